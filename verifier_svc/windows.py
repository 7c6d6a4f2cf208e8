"""Which sessions look ahead in a step, and what came of it: a session whose own drafts have no window never does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from outrider.core.budget import Budget, CostModel
from outrider.core.sampler import Choice
from outrider.core.tree import Node
from verifier_svc.own import SENDER, LookaheadDrafts
from verifier_svc.step import Verdicts, Work
from verifier_svc.timing import StepTimes

FOLLOWING = 0.1  # how far an average follows one step


class Ahead(NamedTuple):
    """What looking ahead takes of a step."""

    rows: int
    price: float  # tokens that could be said in their time; they are worth that at least


def look_ahead(works: Sequence[Work], base: int, budget: Budget, cost: CostModel, times: StepTimes, most: int) -> Ahead:
    """Has those of the works look ahead for which that pays, beside a step of `base` rows and the nodes of `budget`.

    A row costs its time at the rate at which steps like this, with what they take outside the pass, say tokens of all
    sessions: the more there are, the less a window of one of them pays. One at the most has it on trial. With the nodes
    it makes at most `most` rows.
    """
    first = base + budget.nodes
    rows, total, trial, rate = 0, 0.0, True, 0.0
    for work in works:
        own, session = work.session.own, work.session
        if not isinstance(own, LookaheadDrafts) or own.read_to < len(session.tokens):
            continue
        if session.room < 2 or not session.ceilings.depth:
            continue
        began = time.perf_counter()
        window = own.lookahead.rows()
        more = len(window.tokens)
        rate = rate or budget.expected / (cost.seconds(first) + times.medians().overhead)
        price = rate * (cost.seconds(first + rows + more) - cost.seconds(first + rows) + own.seconds)
        if budget.nodes + rows + more <= most and own.worth.takes(price, trial=trial):
            work.window, work.window_price, work.window_seconds = window, price, time.perf_counter() - began
            trial = trial and not own.worth.trying
            rows += more
            total += price
    return Ahead(rows, total)


def advance(work: Work, judge: Verdicts) -> None:
    """The pass is over: the window moves on, before the text does."""
    own = work.session.own
    if work.window.tokens and isinstance(own, LookaheadDrafts):
        began = time.perf_counter()
        own.lookahead.advance(judge.guesses())
        work.window_seconds += time.perf_counter() - began


def settle(work: Work, path: Sequence[Node], choices: Sequence[Choice], price: float) -> None:
    """A step that verified nodes down to that price accepts `path`, and says `choices`. Comes before the text goes on.

    What a window brought is how much further the target followed the proposals than it would have followed those made
    of the text's own n-grams, as far as no drafter proposed the same.
    """
    own = work.session.own
    if not isinstance(own, LookaheadDrafts) or not work.session.plan.depth:
        return
    if not work.window.tokens:
        own.worth.rest(len(choices))
        return
    began = time.perf_counter()
    reached, without = own.lookahead.reaches([choice.token for choice in choices], price)
    gained = sum(work.session.tree.origins(node) == {SENDER} for node in path[without:reached])
    own.worth.observe(gained - max(0, without - reached), work.window_price)
    spent = work.window_seconds + time.perf_counter() - began
    own.seconds += FOLLOWING * (spent - own.seconds) if own.seconds else spent
