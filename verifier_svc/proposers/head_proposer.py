"""Drafting with heads on the target for all sessions of a verifier: after a step, level by level, one call each.

A level is drafted while its expected tokens are more than all sessions commit in its time. Whether a session takes part
is tried and measured, as for lookahead: the accepted tokens that its rounds alone drafted, against its share of their
time. A session begins with what sessions with the same rule and temperature bucket have learned. For one that takes no
part only its features are kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

from outrider.core.acceptance import Walk
from outrider.core.construction.expansion import DrafterFits
from outrider.core.control.cost.calibration import Calibration
from outrider.core.control.trial_gate import TrialGate
from outrider.core.proposers.lookup import fits
from outrider.core.session.contract import Contract
from outrider.core.stats import Ema
from outrider.core.tree.node import Node
from outrider.engine.executor import Executor
from outrider.engine.growth import LEVEL_ROWS, MOST_LEVELS, GrownLevel
from outrider.engine.heads.speculator import HeadRoot, KeptFeatures, Speculator
from outrider.engine.kv.kv_slots import AcquiredSlot
from verifier_svc.batch import SessionWork, StepBatch, kept_rows
from verifier_svc.proposers.head_drafts import HeadDrafts, RoundTerms
from verifier_svc.session import VerifierSession

if TYPE_CHECKING:
    from torch import Tensor

EMA_WEIGHT = 0.2  # weight of the latest round in an average
FADING = 0.98  # factor on a level's time whenever it is too dear: one slow level does not stop drafting


class HeadProposer:
    """Drafts with heads for a step scheduler. This one has none, and drafts nothing."""

    def open(self, contract: Contract, kv_slot: AcquiredSlot, executor: Executor) -> HeadDrafts | None:
        """Return the drafts of a session that begins in a slot; None: heads draft nothing for it."""
        return None

    def store(self, step: StepBatch, walks: Sequence[Walk | None], executor: Executor) -> None:
        """Keep the features of the rows that the step commits. Called after the pass and before the commit."""

    async def draft(self, step: StepBatch, executor: Executor) -> None:
        """Drafts below the new roots, after the step has committed."""


class _RoundSession(NamedTuple):
    """A session that takes part in a round."""

    session: VerifierSession
    heads: HeadDrafts


class _ExpandedNode(NamedTuple):
    """A node that the next level expands."""

    member: _RoundSession
    node: Node


class SpeculatorProposer(HeadProposer):
    """Drafts with one speculator."""

    def __init__(self, speculator: Speculator, hidden: Callable[[], Tensor], *, every: bool) -> None:
        """`hidden`: returns the last pass's features, of `every` row or only of rows with logits."""
        self._speculator = speculator
        self._hidden = hidden
        self._every = every
        self._calibration = Calibration()
        self._shared: dict[tuple[str, str], tuple[list[DrafterFits], TrialGate]] = {}  # by rule and temperature bucket
        self._level_s = Ema(EMA_WEIGHT)  # time of one more level, on average; 0: not known
        self._grown_s = Ema(EMA_WEIGHT)  # average time of a level that grows with the roots
        self._round_s = Ema(EMA_WEIGHT)  # time of a round, for each session in it, on average

    def open(self, contract: Contract, kv_slot: AcquiredSlot, executor: Executor) -> HeadDrafts | None:
        executor.enqueue(partial(self._speculator.open_slot, kv_slot.slot, kv_slot.source, kv_slot.cached))
        if not fits(contract) or not contract.allows_any(self._speculator.unpadded_vocabulary):
            return None
        key = contract.rule, contract.temperature_bucket
        if key not in self._shared:
            # All sessions share a round, so a trial never delays one session for another, whatever it costs.
            self._shared[key] = [DrafterFits() for _ in range(self._speculator.depth)], TrialGate(math.inf)
        return HeadDrafts(contract, *contract.own_or_shared((self._calibration, *self._shared[key])))

    def store(self, step: StepBatch, walks: Sequence[Walk | None], executor: Executor) -> None:
        kept = [
            KeptFeatures(work.session.kv_slot.slot, work.start, rows, _tokens(work, walked, len(rows) + 1))
            for work, walked, rows in kept_rows(step, walks, every=self._every)
        ]
        if kept:
            executor.enqueue(lambda: self._speculator.add_features(self._hidden(), kept))

    async def draft(self, step: StepBatch, executor: Executor) -> None:
        wanting = [
            _RoundSession(session, session.heads)
            for session in step.sessions
            if session.heads is not None and self._wants(session, session.heads, step.rate)
        ]
        if not wanting:
            return
        began = time.perf_counter()
        for session, heads in wanting:
            plan = session.ceilings
            plan = replace(plan, depth=min(plan.depth, self._speculator.depth))
            min_path_score, vocabulary = session.terms.verified_min_path_score, session.unpadded_vocabulary
            heads.begin(RoundTerms(session.tree, session.sampler, vocabulary, plan, min_path_score))
        levels = self._grown_levels(wanting, step.rate)
        roots = [self._root(member, grows=levels > 0) for member in wanting]
        rows, grown = await executor.call(partial(self._speculator.begin, roots, levels))
        drafting: list[_RoundSession] = []
        for number, (member, row) in enumerate(zip(wanting, rows, strict=True)):
            if row is not None and not member.session.finished:
                drafting.append(member)
                member.heads.propose(member.session.tree.root, number, row)
        growing = [member for member, root, row in zip(wanting, roots, rows, strict=True) if root.growth and row]
        first = self._propose_grown(growing, grown, len(roots))
        self._grown_s.observe((time.perf_counter() - began) / (1 + len(grown)))
        while level := self._next_level(drafting, step.rate):
            level_began = time.perf_counter()
            expand = partial(self._speculator.expand, [member.heads.speculator_node(node) for member, node in level])
            level_rows = expand() if self._speculator.all_levels_at_once else await executor.call(expand)
            for number, ((member, node), row) in enumerate(zip(level, level_rows, strict=True), first):
                if not member.session.finished and member.session.tree.holds(node):
                    member.heads.propose(node, number, row)
            first += len(level)
            self._level_s.observe(time.perf_counter() - level_began)
        share = (time.perf_counter() - began) / len(wanting)
        self._round_s.observe(share)
        for session, heads in drafting:
            heads.cost_tokens = share * step.rate
            session.arrivals.grew(session.tree_value())

    def _wants(self, session: VerifierSession, heads: HeadDrafts, rate: float) -> bool:
        if session.finished or session.unread > 1:
            return False
        if session.ceilings.depth == 0 or session.room < 2:
            return False
        return heads.trial_gate.takes(self._round_s.mean * rate, trial=True)

    def _root(self, member: _RoundSession, *, grows: bool) -> HeadRoot:
        session, heads = member
        draw = heads.draw(restricts=True) if self._speculator.grows_trees else None
        growth = heads.growth() if grows and draw is not None else None
        return HeadRoot(session.kv_slot.slot, session.tokens, draw, growth)

    def _grown_levels(self, members: Sequence[_RoundSession], rate: float) -> int:
        """Return how many levels below the roots are to grow at once: those that are worth their time."""
        levels, most = 0, MOST_LEVELS if self._speculator.grows_trees else 0
        cost = self._grown_s.mean * rate
        while levels < most and sum(heads.expected_gain(levels + 1) for _, heads in members) > cost:
            levels += 1
        self._grown_s.mean *= 1.0 if levels else FADING
        return levels

    def _propose_grown(self, growing: Sequence[_RoundSession], levels: Sequence[GrownLevel], first: int) -> int:
        """Propose from grown levels, whose first row has the number `first`. Return the number behind the last one."""
        numbered: list[list[Node | None]] = [
            [session.tree.root, *repeat(None, LEVEL_ROWS - 1)] for session, _ in growing
        ]
        for level in levels:
            for index, (session, heads) in enumerate(growing):
                if not session.finished:
                    heads.propose_grown(numbered[index], first, level, index)
                first += LEVEL_ROWS
        return first

    def _next_level(self, drafting: Sequence[_RoundSession], rate: float) -> list[_ExpandedNode]:
        """Return the nodes of all sessions to expand next; empty if the level is not worth its time."""
        level: list[_ExpandedNode] = []
        gain = 0.0
        for member in drafting:
            if not member.session.finished:
                nodes = member.heads.frontier()
                level += [_ExpandedNode(member, node) for node in nodes]
                gain += member.heads.gain(nodes)
        if gain > self._level_s.mean * rate:
            return level
        self._level_s.mean *= FADING if level else 1.0
        return []


def _tokens(work: SessionWork, walked: Walk | None, count: int) -> list[int]:
    """Return tokens of a text from the step's first row on, as it commits them."""
    read = work.session.tokens[work.start : min(work.start + count, work.end + (walked is None))]
    return read if walked is None else [*read, *(choice.token for choice in walked.choices)][:count]
