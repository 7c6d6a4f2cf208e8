"""How deep steps verified, and how deep they accepted: acceptance by depth, over many sessions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from outrider.core.contract import StepReport

DEEPEST = 64  # of a plan


class Depths:
    """Counts steps that verified something by where they ended; sums over depths are made when somebody asks."""

    def __init__(self) -> None:
        self.steps = self.verified = self.accepted = 0
        self._tried = [0] * (DEEPEST + 1)  # steps whose deepest verified node was there
        self._reached = [0] * (DEEPEST + 1)  # steps whose accepted path ended there

    def observe(self, report: StepReport) -> None:
        """Takes a step; one without a tree tells nothing."""
        if report.verified:
            self.steps += 1
            self.verified += report.verified
            self.accepted += report.accepted
            self._tried[min(report.verified_depth, DEEPEST)] += 1
            self._reached[min(report.accepted, DEEPEST)] += 1

    @property
    def tried(self) -> list[int]:
        """[depth - 1]: steps that verified a node there."""
        return _beyond(self._tried)

    @property
    def reached(self) -> list[int]:
        """[depth - 1]: steps whose accepted path reached that depth; 0 where none of those that tried did."""
        reached = _beyond(self._reached)
        return reached + [0] * (len(self.tried) - len(reached))


def _beyond(ends: Sequence[int]) -> list[int]:
    counts = [*accumulate(reversed(ends))][-2::-1]
    while counts and not counts[-1]:
        counts.pop()
    return counts
