"""Measures what each of a session's drafters contributes beside the others, and finds drafters that do not help.

See docs/drafters.md, "How drafters work".
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.stats import FadingRatio

STEPS = 64  # steps with the same drafters before one of them may be removed
MIN_ALONE = 0.02  # accepted tokens per step, drafted by no other drafter, below which a drafter is removed
MEMORY = 0.98  # weight of the past at each step


@dataclass(frozen=True, slots=True)
class DrafterCredit:
    """One drafter's nodes in one step."""

    drafter_id: str
    verified: int  # the drafter's nodes that the step verified
    accepted: int  # those of the verified nodes that were accepted
    alone: int  # those of the accepted nodes that no other drafter had sent


class CreditTracker:
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

    def observe(self, step_credits: tuple[DrafterCredit, ...]) -> str | None:
        """Add one step, with an entry for each drafter of the session. Return the drafter to remove, or None.

        When the set of drafters changes, all averages start again.
        """
        if {credit.drafter_id for credit in step_credits} != set(self._alone):
            self._alone = {credit.drafter_id: FadingRatio(MEMORY) for credit in step_credits}
            self._steps = 0
        self._steps += 1
        for credit in step_credits:
            self._alone[credit.drafter_id].observe(credit.alone)
        if len(step_credits) < 2 or self._steps < STEPS:
            return None
        worst = min(self._alone, key=lambda drafter: self._alone[drafter].ratio)
        return worst if self._alone[worst].ratio < MIN_ALONE else None
