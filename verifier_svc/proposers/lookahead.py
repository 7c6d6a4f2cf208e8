"""Which sessions use a lookahead window in a step, and what the windows brought.

Only sessions whose n-gram proposer is a `LookaheadProposer` have a window.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from outrider.core.control.cost.budget import CostModel, VerificationBudget
from outrider.core.sampling.sampler import Choice
from outrider.core.tree.node import Node
from verifier_svc.batch import SessionWork, StepVerdicts
from verifier_svc.metrics import StepTimes
from verifier_svc.proposers.ngram_proposer import SENDER, LookaheadProposer


class LookaheadPlan(NamedTuple):
    """The cost of a step's lookahead windows."""

    rows: int
    cost_tokens: float  # tokens that could be committed in their time, and the least that the windows are worth


def look_ahead(
    works: Sequence[SessionWork],
    base: int,
    budget: VerificationBudget,
    cost: CostModel,
    times: StepTimes,
    max_rows: int,
) -> LookaheadPlan:
    """Add windows to those of the works for which a window pays, beside `base` rows and the nodes of `budget`.

    A row costs its time, at the rate at which steps like this one commit tokens of all sessions, the time outside the
    pass included: with more sessions, a window of one of them pays less. At most one session tries its window. Windows
    and nodes together have at most `max_rows` rows.
    """
    first = base + budget.nodes
    rows, total, trial, rate = 0, 0.0, True, 0.0
    for work in works:
        proposer, session = work.session.ngram_proposer, work.session
        if not isinstance(proposer, LookaheadProposer) or proposer.read_to < len(session.tokens):
            continue
        if session.room < 2 or not session.ceilings.depth:
            continue
        began = time.perf_counter()
        window = proposer.lookahead.rows()
        more = len(window.tokens)
        rate = rate or budget.expected / (cost.seconds(first) + times.medians().overhead)
        cost_tokens = rate * (cost.seconds(first + rows + more) - cost.seconds(first + rows) + proposer.seconds.mean)
        if budget.nodes + rows + more <= max_rows and proposer.trial_gate.takes(cost_tokens, trial=trial):
            work.window, work.window_cost_tokens, work.window_seconds = window, cost_tokens, time.perf_counter() - began
            trial = trial and not proposer.trial_gate.trying
            rows += more
            total += cost_tokens
    return LookaheadPlan(rows, total)


def advance(work: SessionWork, verdicts: StepVerdicts) -> None:
    """Move the window on by the target's choices after the pass, before the text goes on."""
    proposer = work.session.ngram_proposer
    if work.window.tokens and isinstance(proposer, LookaheadProposer):
        began = time.perf_counter()
        proposer.lookahead.advance(verdicts.guesses())
        work.window_seconds += time.perf_counter() - began


def settle(work: SessionWork, path: Sequence[Node], choices: Sequence[Choice], min_path_score: float) -> None:
    """Learns from a step that verified nodes down to `min_path_score`, accepts `path` and commits `choices`.

    Called before the text goes on. A window's gain is how much further the target followed its proposals than those of
    the text's own n-grams, without the nodes that drafters proposed as well.
    """
    proposer = work.session.ngram_proposer
    if not isinstance(proposer, LookaheadProposer) or not work.session.terms.plan.depth:
        return
    if not work.window.tokens:
        proposer.trial_gate.observe_unused(len(choices))
        return
    began = time.perf_counter()
    reached, without = proposer.lookahead.reaches([choice.token for choice in choices], min_path_score)
    gained = sum(work.session.tree.ids.origins(node) == {SENDER} for node in path[without:reached])
    proposer.trial_gate.observe(gained - max(0, without - reached), work.window_cost_tokens)
    spent = work.window_seconds + time.perf_counter() - began
    proposer.seconds.observe(spent)
