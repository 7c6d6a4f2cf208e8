"""Measures what each of a session's drafters contributes beside the others, and finds drafters that do not help.

See docs/drafters.md, "How drafters work".
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.stats import FadingRatio


@dataclass(frozen=True, slots=True)
class ContributionTuning:
    """When a drafter is removed."""

    steps: int = 64  # steps with the same drafters before one of them may be removed
    min_alone: float = 0.02  # accepted tokens per step, drafted by no other drafter, below which a drafter is removed


CONTRIBUTION = ContributionTuning()


@dataclass(frozen=True, slots=True)
class DrafterContribution:
    """One drafter's nodes in one step."""

    drafter_id: str
    verified: int  # the drafter's nodes that the step verified
    accepted: int  # those of the verified nodes that were accepted
    alone: int  # those of the accepted nodes that no other drafter had sent


class ContributionTracker:
    """Averages the contribution of each drafter of one tree, in accepted tokens per step.

    A drafter contributes what would be lost without it: accepted tokens that no other drafter had drafted. Two drafters
    that always send the same nodes contribute nothing each, so only one drafter is removed at a time. This is no trial
    (`outrider.core.control.trials`): all drafters draft in every step, so what each adds is counted, not compared.

    Source of the tree that several drafters share: SpecInfer (Miao et al., arXiv 2305.09781, section 3).
    """

    def __init__(self) -> None:
        self._alone: dict[str, FadingRatio] = {}  # accepted nodes that only this drafter sent, per step
        self._steps = 0

    def estimates(self) -> dict[str, float]:
        """Return the accepted tokens per step that each drafter alone had drafted."""
        return {drafter: alone.ratio for drafter, alone in tuple(self._alone.items())}

    def observe(self, contributions: tuple[DrafterContribution, ...]) -> str | None:
        """Add one step, with an entry for each drafter of the session. Return the drafter to remove, or None.

        When the set of drafters changes, all averages start again.
        """
        if {each.drafter_id for each in contributions} != set(self._alone):
            self._alone = {each.drafter_id: FadingRatio() for each in contributions}
            self._steps = 0
        self._steps += 1
        for each in contributions:
            self._alone[each.drafter_id].observe(each.alone)
        if len(contributions) < 2 or self._steps < CONTRIBUTION.steps:
            return None
        worst = min(self._alone, key=lambda drafter: self._alone[drafter].ratio)
        return worst if self._alone[worst].ratio < CONTRIBUTION.min_alone else None
