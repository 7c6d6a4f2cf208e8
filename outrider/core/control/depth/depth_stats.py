"""Acceptance by depth over many sessions: how deep steps verified, and how deep they accepted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from outrider.core.session.contract import StepReport

DEEPEST = 64  # largest depth of a plan


class Depths:
    """Counts steps that verified at least one node, by the depths that they verified and accepted."""

    def __init__(self) -> None:
        self.steps = self.verified = self.accepted = 0
        self._tried = [0] * (DEEPEST + 1)  # steps whose deepest verified node was there
        self._reached = [0] * (DEEPEST + 1)  # steps whose accepted path ended there

    def observe(self, report: StepReport) -> None:
        """Add one step. A step that verified no node is ignored."""
        if report.verified:
            self.steps += 1
            self.verified += report.verified
            self.accepted += report.accepted
            self._tried[min(report.verified_depth, DEEPEST)] += 1
            self._reached[min(report.accepted, DEEPEST)] += 1

    @property
    def tried(self) -> list[int]:
        """Steps that verified a node at each depth: [depth - 1]."""
        return _beyond(self._tried)

    @property
    def reached(self) -> list[int]:
        """Steps whose accepted path reached each depth: [depth - 1], as long as `tried`."""
        reached = _beyond(self._reached)
        return reached + [0] * (len(self.tried) - len(reached))


def _beyond(ends: Sequence[int]) -> list[int]:
    counts = [*accumulate(reversed(ends))][-2::-1]
    while counts and not counts[-1]:
        counts.pop()
    return counts
