"""Acceptance by depth over many sessions: how deep steps verified, and how deep they accepted."""

from __future__ import annotations

from outrider.core.session.contract import StepReport

DEEPEST = 64  # largest depth of a plan


class Depths:
    """Counts steps that verified at least one node, by the depths that they verified and accepted."""

    def __init__(self) -> None:
        self.steps = self.verified = self.accepted = 0
        self.tried: list[int] = []  # [depth - 1] steps that verified a node at each depth
        self.reached: list[int] = []  # [depth - 1] steps whose accepted path reached each depth

    def observe(self, report: StepReport) -> None:
        """Add one step. A step that verified no node is ignored."""
        if not report.verified:
            return
        self.steps += 1
        self.verified += report.verified
        self.accepted += report.accepted
        deepest = min(max(report.verified_depth, report.accepted), DEEPEST)
        for counts, reached in ((self.tried, report.verified_depth), (self.reached, report.accepted)):
            counts += [0] * (deepest - len(counts))
            for depth in range(min(reached, DEEPEST)):
                counts[depth] += 1
