"""How often a drafter's best guess is the target's token, and whether one version of it is worse than another.

Places of one text resemble each other, so they tell less than as many independent ones would: a difference counts when
it is twice its standard error with `CLUMPS` places to one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

WINDOW = 4096.0  # places that count in full; older ones fade
ENOUGH = 512  # places, of either version, before they are compared
CLUMPS = 2.0  # places that tell as much as one independent one
ERRORS = 2.0  # standard errors that make a difference
LEAST = 0.02  # of a share that is worth going back for


@dataclass(slots=True)
class Seen:
    """Of one version, for each class of temperatures: places where it agreed, and all. Both fade."""

    counts: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, heat: str, agreed: int, judged: int) -> None:
        """Some more places."""
        before_agreed, before = self.counts.get(heat, (0.0, 0.0))
        fading = (1.0 - 1.0 / WINDOW) ** judged
        self.counts[heat] = before_agreed * fading + agreed, before * fading + judged

    @property
    def judged(self) -> float:
        """Places that count, of all temperatures."""
        return sum(judged for _, judged in self.counts.values())

    @property
    def share(self) -> float:
        """Of them those where it agreed."""
        return sum(agreed for agreed, _ in self.counts.values()) / max(1.0, self.judged)


def worse(now: Seen, before: Seen) -> str:
    """Why what agrees `now` is worse than what did `before`; "" when it is not, or when too little was seen.

    Compared temperature by temperature, as far as both have them: traffic that turns hotter makes no version worse.
    """
    both = [heat for heat in now.counts if now.counts[heat][1] and before.counts.get(heat, (0.0, 0.0))[1]]
    if min(sum(seen.counts[heat][1] for heat in both) for seen in (now, before)) < ENOUGH:
        return ""
    weights = {heat: min(now.counts[heat][1], before.counts[heat][1]) for heat in both}
    total = sum(weights.values())
    fall = variance = 0.0
    for heat, weight in weights.items():
        shares = [_share(seen.counts[heat]) for seen in (before, now)]
        fall += weight / total * (shares[0] - shares[1])
        variance += (
            (weight / total) ** 2
            * CLUMPS
            * sum(
                max(share * (1.0 - share), 0.01) / seen.counts[heat][1]
                for share, seen in zip(shares, (before, now), strict=True)
            )
        )
    if fall < max(LEAST, ERRORS * math.sqrt(variance)):
        return ""
    return f"it agrees with the target {100 * fall:.1f} points less often than the one before"


def _share(counts: tuple[float, float]) -> float:
    return counts[0] / counts[1]
