"""Drafting with heads on the target for all sessions of a verifier: after a step, level by level, one call each.

A level is taken while what it is expected to bring is worth more than what all sessions say in its time. Whether a
session takes part at all is tried and measured, as for looking ahead: what its rounds brought beside what others had
drafted, against its share of their time. It begins with what was learned of sessions of its kind. One that takes no
part costs nothing but that its features are written down.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from outrider.core.calibration import Calibration
from outrider.core.contract import Contract
from outrider.core.growth import Fits
from outrider.core.lookup import fits
from outrider.core.rules import Walk
from outrider.core.tree import Node
from outrider.core.worth import Worth
from outrider.engine.heads.speculator import FloatRows, Root, Speculator
from outrider.engine.passes import Passes
from outrider.engine.slots import Taken
from verifier_svc.heads import HeadDrafts
from verifier_svc.session import Session
from verifier_svc.step import Step, kept_rows

if TYPE_CHECKING:
    from torch import Tensor

FOLLOWING = 0.2  # how far an average follows one round
FADING = 0.98  # of what a level takes, each time that it is found too much: it may have been slow but once


class Drafting(Protocol):
    """What a step loop has drafted by heads."""

    def open(self, contract: Contract, place: Taken, passes: Passes) -> HeadDrafts | None:
        """A session begins in a slot. None: nothing is drafted for it."""

    def keep(self, step: Step, walks: Sequence[Walk | None], passes: Passes) -> None:
        """A pass has run; comes before anything that it says is committed."""

    async def draft(self, step: Step, passes: Passes) -> None:
        """The step has committed."""


class NoHeads(Drafting):
    """There are none."""

    def open(self, contract: Contract, place: Taken, passes: Passes) -> HeadDrafts | None:
        return None

    def keep(self, step: Step, walks: Sequence[Walk | None], passes: Passes) -> None:
        pass

    async def draft(self, step: Step, passes: Passes) -> None:
        pass


class _Drafting(NamedTuple):
    """A session in a round."""

    session: Session
    heads: HeadDrafts


class _Asked(NamedTuple):
    """A node whose children are asked for."""

    of: _Drafting
    node: Node


class HeadDrafting(Drafting):
    """With one speculator."""

    def __init__(self, speculator: Speculator, hidden: Callable[[], Tensor], *, every: bool) -> None:
        """`hidden`: the features of the last pass, of `every` row or of those whose logits were wanted."""
        self._speculator = speculator
        self._hidden = hidden
        self._every = every
        self._calibration = Calibration()
        self._known: dict[tuple[str, str], tuple[list[Fits], Worth]] = {}  # by rule and class of temperatures
        self._level_s = 0.0  # that a further level takes, on average; 0: not known
        self._round_s = 0.0  # that a round takes of one session's time

    def open(self, contract: Contract, place: Taken, passes: Passes) -> HeadDrafts | None:
        passes.later(partial(self._speculator.take, place.slot, place.source, place.cached))
        if not fits(contract) or not contract.allows_any(self._speculator.sayable):
            return None
        kind = contract.rule, contract.heat
        if kind not in self._known:
            # A round is shared by all sessions, so however dear it is, a trial delays none for another one's sake.
            self._known[kind] = [Fits() for _ in range(self._speculator.depth)], Worth(dearest=math.inf)
        return HeadDrafts(contract, self._calibration, *self._known[kind])

    def keep(self, step: Step, walks: Sequence[Walk | None], passes: Passes) -> None:
        hidden = self._hidden()
        for work, rows in kept_rows(step, walks, every=self._every):
            passes.later(partial(self._speculator.keep, work.session.place.slot, work.start, hidden[rows]))

    async def draft(self, step: Step, passes: Passes) -> None:
        taking = [session for session in step.sessions if self._wants(session, step.rate)]
        if not taking:
            return
        began = time.perf_counter()
        roots = [Root(session.place.slot, session.tokens) for session in taking]
        rows = await passes.call(partial(self._speculator.begin, roots))
        drafting: list[_Drafting] = []
        for number, (session, row) in enumerate(zip(taking, rows, strict=True)):
            if row is not None and session.heads is not None and not session.finished:
                drafting.append(_Drafting(session, session.heads))
                session.heads.begin(session.tree)
                _propose(drafting[-1], session.tree.root, number, row)
        first = len(roots)
        while asked := self._next_level(drafting, step.rate):
            level_began = time.perf_counter()
            expand = partial(self._speculator.expand, [of.heads.asked(node) for of, node in asked])
            said = expand() if self._speculator.at_once else await passes.call(expand)
            for number, ((of, node), row) in enumerate(zip(asked, said, strict=True), first):
                if not of.session.finished and of.session.tree.holds(node):
                    _propose(of, node, number, row)
            first += len(asked)
            self._level_s = _followed(self._level_s, time.perf_counter() - level_began)
        share = (time.perf_counter() - began) / len(taking)
        self._round_s = _followed(self._round_s, share)
        for session, heads in drafting:
            heads.price = share * step.rate
            session.arrivals.grew(session.worth())

    def _wants(self, session: Session, rate: float) -> bool:
        heads = session.heads
        if heads is None or session.finished or session.unread > 1:
            return False
        if session.ceilings.depth == 0 or session.room < 2:
            return False
        return heads.worth.takes(self._round_s * rate, trial=True)

    def _next_level(self, drafting: Sequence[_Drafting], rate: float) -> list[_Asked]:
        """What to expand next, of all sessions; nothing where that is not worth its time."""
        asked: list[_Asked] = []
        gain = 0.0
        for of in drafting:
            session, heads = of
            if session.finished:
                continue
            plan, price = session.ceilings, session.verified_price
            nodes = heads.frontier(session.tree, plan, self._speculator.depth, price)
            asked += [_Asked(of, node) for node in nodes]
            gain += heads.gain(session.tree, nodes, plan.width, price)
        if gain > self._level_s * rate:
            return asked
        self._level_s *= FADING if asked else 1.0
        return []


def _propose(of: _Drafting, node: Node, number: int, row: FloatRows) -> None:
    session, heads = of
    row = row[: session.sayable]
    heads.propose(session.tree, session.sampler, node, number, row, session.ceilings, session.verified_price)


def _followed(average: float, seconds: float) -> float:
    return average + FOLLOWING * (seconds - average) if average else seconds
