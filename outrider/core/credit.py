"""What each of a session's drafters is worth beside the others, and which of them never helps."""

from __future__ import annotations

from dataclasses import dataclass

STEPS = 64  # with all drafters there, before one is judged
LEAST = 0.02  # accepted tokens a step that nobody else had drafted
MEMORY = 0.98  # weight of the past at each step


@dataclass(frozen=True, slots=True)
class Credit:
    """What a step owed to one drafter."""

    drafter_id: str
    verified: int  # of its nodes
    accepted: int  # of these
    alone: int  # of these, those that no other drafter had sent


class Worth:
    """Follows the credit of drafters of one tree: SpecInfer's merged tree (Miao et al., arXiv 2305.09781, section 3).

    A drafter is worth what would be lost without it: accepted tokens that it alone had drafted. Of two that always say
    the same neither adds anything, so they are judged one at a time.
    """

    def __init__(self) -> None:
        self._alone: dict[str, float] = {}
        self._weight = 0.0
        self._steps = 0

    def observe(self, owed: tuple[Credit, ...]) -> str | None:
        """Takes what a step owed, one for each drafter of the session. Returns the drafter that is to go, if one is.

        Others than before are judged from their beginning.
        """
        if {credit.drafter_id for credit in owed} != set(self._alone):
            self._alone = {credit.drafter_id: 0.0 for credit in owed}
            self._weight, self._steps = 0.0, 0
        self._weight = MEMORY * self._weight + 1.0
        self._steps += 1
        for credit in owed:
            self._alone[credit.drafter_id] = MEMORY * self._alone[credit.drafter_id] + credit.alone
        if len(owed) < 2 or self._steps < STEPS:
            return None
        worst = min(self._alone, key=lambda drafter: self._alone[drafter])
        return worst if self._alone[worst] / self._weight < LEAST else None
