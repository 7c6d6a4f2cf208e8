"""Compares two versions of a drafter by how often their best candidate is the target's token.

Positions of one text are correlated, so that they are worth fewer independent ones. A difference is significant when it
exceeds two standard errors, computed with one independent observation for every two positions. This is no trial
(`outrider.core.control.trials`): versions follow one another, so their positions cannot be interleaved, and comparing
them costs nothing. See docs/learning.md, "While drafters learn".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.core.stats import FadingRatio


@dataclass(frozen=True, slots=True)
class VersionTuning:
    """When one version counts as worse than another."""

    window: float = 4096.0  # time constant of the exponential fading, in positions
    min_positions: int = 512  # positions of either version before the two are compared
    positions_per_sample: float = 2.0  # positions that count as one independent observation
    standard_errors: float = 2.0  # standard errors from which a difference is significant
    min_fall: float = 0.02  # smallest fall of the share (0 to 1) that counts as worse


VERSIONS = VersionTuning()


class AgreementCounts:
    """How often one version agreed with the target, for each temperature bucket: positions where it did, of all
    positions. Both fade exponentially."""

    def __init__(self) -> None:
        self.counts: dict[str, FadingRatio] = {}

    def add(self, bucket: str, agreed: int, compared: int) -> None:
        """Add `compared` positions, `agreed` of which agreed with the target."""
        counts = self.counts.setdefault(bucket, FadingRatio(1.0 - 1.0 / VERSIONS.window))
        counts.observe(agreed, compared, steps=compared)

    @property
    def compared(self) -> float:
        """Positions over all temperature buckets, weighted by age."""
        return sum(seen.attempts for seen in self.counts.values())

    @property
    def share(self) -> float:
        """The share of positions where the version agreed with the target, 0 to 1."""
        return sum(seen.hits for seen in self.counts.values()) / max(1.0, self.compared)


def worse(now: AgreementCounts, before: AgreementCounts) -> str:
    """Return why the version `now` is worse than the version `before`; "" when it is not, or too few positions count.

    The versions are compared within each temperature bucket that both have, so that a change of the traffic's
    temperature makes no version worse.
    """
    both = [bucket for bucket in now.counts if now.counts[bucket].attempts and bucket in before.counts]
    both = [bucket for bucket in both if before.counts[bucket].attempts]
    if min(sum(seen.counts[bucket].attempts for bucket in both) for seen in (now, before)) < VERSIONS.min_positions:
        return ""
    pairs = [(before.counts[bucket], now.counts[bucket]) for bucket in both]
    weights = [min(seen.attempts for seen in pair) for pair in pairs]
    fall = variance = 0.0
    for weight, pair in zip(weights, pairs, strict=True):
        part = weight / sum(weights)
        fall += part * (pair[0].ratio - pair[1].ratio)
        errors = (max(seen.ratio * (1.0 - seen.ratio), 0.01) / seen.attempts for seen in pair)
        variance += part**2 * VERSIONS.positions_per_sample * sum(errors)
    if fall < max(VERSIONS.min_fall, VERSIONS.standard_errors * math.sqrt(variance)):
        return ""
    return f"it agrees with the target {100 * fall:.1f} points less often than the one before"
