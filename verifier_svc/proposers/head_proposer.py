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
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from outrider.core.acceptance import Walk
from outrider.core.construction.expansion import DrafterFits
from outrider.core.control.calibration import Calibration
from outrider.core.control.trial_gate import TrialGate
from outrider.core.proposers.lookup import fits
from outrider.core.session.contract import Contract
from outrider.core.stats import Ema
from outrider.core.tree.node import Node
from outrider.engine.executor import Executor
from outrider.engine.heads.speculator import FloatRows, HeadRoot, Speculator
from outrider.engine.kv_slots import AcquiredSlot
from verifier_svc.batch import StepBatch, kept_rows
from verifier_svc.proposers.head_drafts import HeadDrafts
from verifier_svc.session import VerifierSession

if TYPE_CHECKING:
    from torch import Tensor

EMA_WEIGHT = 0.2  # weight of the latest round in an average
FADING = 0.98  # factor on a level's time whenever it is too dear: one slow level does not stop drafting


class HeadProposer(Protocol):
    """Drafts with heads for a step scheduler."""

    def open(self, contract: Contract, kv_slot: AcquiredSlot, executor: Executor) -> HeadDrafts | None:
        """Return the drafts of a session that begins in a slot; None: heads draft nothing for it."""

    def store(self, step: StepBatch, walks: Sequence[Walk | None], executor: Executor) -> None:
        """Keeps the features of the rows that the step commits. Called after the pass and before the commit."""

    async def draft(self, step: StepBatch, executor: Executor) -> None:
        """Drafts below the new roots, after the step has committed."""


class NoHeadProposer(HeadProposer):
    """Drafts nothing."""

    def open(self, contract: Contract, kv_slot: AcquiredSlot, executor: Executor) -> HeadDrafts | None:
        return None

    def store(self, step: StepBatch, walks: Sequence[Walk | None], executor: Executor) -> None:
        pass

    async def draft(self, step: StepBatch, executor: Executor) -> None:
        pass


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
        self._round_s = Ema(EMA_WEIGHT)  # time of a round, for each session in it, on average

    def open(self, contract: Contract, kv_slot: AcquiredSlot, executor: Executor) -> HeadDrafts | None:
        executor.enqueue(partial(self._speculator.open_slot, kv_slot.slot, kv_slot.source, kv_slot.cached))
        if not fits(contract) or not contract.allows_any(self._speculator.unpadded_vocabulary):
            return None
        key = contract.rule, contract.temperature_bucket
        if key not in self._shared:
            # All sessions share a round, so a trial never delays one session for another, whatever it costs.
            self._shared[key] = [DrafterFits() for _ in range(self._speculator.depth)], TrialGate(max_price=math.inf)
        return HeadDrafts(contract, *contract.own_or_shared((self._calibration, *self._shared[key])))

    def store(self, step: StepBatch, walks: Sequence[Walk | None], executor: Executor) -> None:
        hidden = self._hidden()
        for work, rows in kept_rows(step, walks, every=self._every):
            executor.enqueue(
                partial(self._speculator.add_features, work.session.kv_slot.slot, work.start, hidden[rows])
            )

    async def draft(self, step: StepBatch, executor: Executor) -> None:
        sessions = [session for session in step.sessions if self._wants(session, step.rate)]
        if not sessions:
            return
        began = time.perf_counter()
        roots = [HeadRoot(session.kv_slot.slot, session.tokens) for session in sessions]
        rows = await executor.call(partial(self._speculator.begin, roots))
        drafting: list[_RoundSession] = []
        for number, (session, row) in enumerate(zip(sessions, rows, strict=True)):
            if row is not None and session.heads is not None and not session.finished:
                drafting.append(_RoundSession(session, session.heads))
                session.heads.begin(session.tree)
                _propose(drafting[-1], session.tree.root, number, row)
        first = len(roots)
        while level := self._next_level(drafting, step.rate):
            level_began = time.perf_counter()
            expand = partial(self._speculator.expand, [member.heads.speculator_node(node) for member, node in level])
            level_rows = expand() if self._speculator.all_levels_at_once else await executor.call(expand)
            for number, ((member, node), row) in enumerate(zip(level, level_rows, strict=True), first):
                if not member.session.finished and member.session.tree.holds(node):
                    _propose(member, node, number, row)
            first += len(level)
            self._level_s.observe(time.perf_counter() - level_began)
        share = (time.perf_counter() - began) / len(sessions)
        self._round_s.observe(share)
        for session, heads in drafting:
            heads.price = share * step.rate
            session.arrivals.grew(session.tree_value())

    def _wants(self, session: VerifierSession, rate: float) -> bool:
        heads = session.heads
        if heads is None or session.finished or session.unread > 1:
            return False
        if session.ceilings.depth == 0 or session.room < 2:
            return False
        return heads.trial_gate.takes(self._round_s.mean * rate, trial=True)

    def _next_level(self, drafting: Sequence[_RoundSession], rate: float) -> list[_ExpandedNode]:
        """Return the nodes of all sessions to expand next; empty if the level is not worth its time."""
        level: list[_ExpandedNode] = []
        gain = 0.0
        for member in drafting:
            session, heads = member
            if session.finished:
                continue
            plan, price = session.ceilings, session.terms.verified_price
            nodes = heads.frontier(session.tree, plan, self._speculator.depth, price)
            level += [_ExpandedNode(member, node) for node in nodes]
            gain += heads.gain(session.tree, nodes, plan.width, price)
        if gain > self._level_s.mean * rate:
            return level
        self._level_s.mean *= FADING if level else 1.0
        return []


def _propose(member: _RoundSession, node: Node, number: int, row: FloatRows) -> None:
    session, heads = member
    row = row[: session.unpadded_vocabulary]
    heads.propose(session.tree, session.sampler, node, number, row, session.ceilings, session.terms.verified_price)
