"""Compares two versions of a drafter by how often their best candidate is the target's token.

Positions of one text are correlated, so that they are worth fewer independent ones. A difference is significant when it
exceeds `STANDARD_ERRORS` (2) standard errors, computed with one independent observation for every
`POSITIONS_PER_SAMPLE` positions. See docs/learning.md, "While drafters learn".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

WINDOW = 4096.0  # time constant of the exponential fading, in positions
MIN_POSITIONS = 512  # positions of either version before the two are compared
POSITIONS_PER_SAMPLE = 2.0  # positions that count as one independent observation
STANDARD_ERRORS = 2.0  # standard errors from which a difference is significant
MIN_FALL = 0.02  # smallest fall of the share (0 to 1) that counts as worse


@dataclass(slots=True)
class AgreementCounts:
    """One version's counts for each temperature bucket: positions where it agreed with the target, and all positions.
    Both fade exponentially."""

    counts: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, bucket: str, agreed: int, compared: int) -> None:
        """Add `compared` positions, `agreed` of which agreed with the target."""
        before_agreed, before = self.counts.get(bucket, (0.0, 0.0))
        fading = (1.0 - 1.0 / WINDOW) ** compared
        self.counts[bucket] = before_agreed * fading + agreed, before * fading + compared

    @property
    def compared(self) -> float:
        """Positions over all temperature buckets, weighted by age."""
        return sum(compared for _, compared in self.counts.values())

    @property
    def share(self) -> float:
        """The share of positions where the version agreed with the target, 0 to 1."""
        return sum(agreed for agreed, _ in self.counts.values()) / max(1.0, self.compared)


def worse(now: AgreementCounts, before: AgreementCounts) -> str:
    """Return why the version `now` is worse than the version `before`; "" when it is not, or too few positions count.

    The versions are compared within each temperature bucket that both have, so that a change of the traffic's
    temperature makes no version worse.
    """
    both = [bucket for bucket in now.counts if now.counts[bucket][1] and before.counts.get(bucket, (0.0, 0.0))[1]]
    if min(sum(seen.counts[bucket][1] for bucket in both) for seen in (now, before)) < MIN_POSITIONS:
        return ""
    weights = {bucket: min(now.counts[bucket][1], before.counts[bucket][1]) for bucket in both}
    total = sum(weights.values())
    fall = variance = 0.0
    for bucket, weight in weights.items():
        shares = [_share(seen.counts[bucket]) for seen in (before, now)]
        fall += weight / total * (shares[0] - shares[1])
        variance += (
            (weight / total) ** 2
            * POSITIONS_PER_SAMPLE
            * sum(
                max(share * (1.0 - share), 0.01) / seen.counts[bucket][1]
                for share, seen in zip(shares, (before, now), strict=True)
            )
        )
    if fall < max(MIN_FALL, STANDARD_ERRORS * math.sqrt(variance)):
        return ""
    return f"it agrees with the target {100 * fall:.1f} points less often than the one before"


def _share(counts: tuple[float, float]) -> float:
    return counts[0] / counts[1]
