"""Calibration of a drafter's edge scores by how often its nodes turn out to be the target's token.

Scores are natural logarithms of probabilities. See docs/protocol.md, section 7.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from outrider.core.stats import LONG, FadingRatio


@dataclass(frozen=True, slots=True)
class CalibrationTuning:
    """How much is learned of a drafter's scores."""

    # Bounds of the classes of claims, as minus the logarithm of the claimed probability: finer near certainty.
    bounds: tuple[float, ...] = (0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0)
    prior: float = 8.0  # hits that the initial trust in a drafter counts as
    max_factor: float = 4.0  # largest correction of a probability


CALIBRATION = CalibrationTuning()


class Calibration:
    """Corrects one drafter's edge scores so that they equal the rate at which its nodes are the target's token.

    In each class of claims the correction is hits / claimed hits, both with a prior that trusts the drafter. Correct
    scores stay unchanged; scores that are too high fall until they match the observed rate.
    """

    def __init__(self) -> None:
        self._hits = [FadingRatio(LONG) for _ in range(len(CALIBRATION.bounds) + 1)]  # of claimed hits

    def observe(self, claimed: float, hit: bool) -> None:
        """Record a verified node whose parent was on the target's path. `claimed` is the logarithm of its claimed
        probability, `hit` whether it was the target's token."""
        kind = bisect_right(CALIBRATION.bounds, -claimed)
        self._hits[kind].observe(hit, math.exp(claimed))

    def estimates(self) -> list[dict[str, float]]:
        """Return the correction of each class of claims: the likeliest claim in it, and the factor."""
        best = [1.0, *(math.exp(-bound) for bound in CALIBRATION.bounds)]
        return [{"claimed": claimed, "factor": self._factor(kind)} for kind, claimed in enumerate(best)]

    def corrected(self, claimed: float) -> float:
        """Return the logarithm of the corrected probability of a claim; at most 0."""
        return min(0.0, claimed + math.log(self._factor(bisect_right(CALIBRATION.bounds, -claimed))))

    def _factor(self, kind: int) -> float:
        hits = self._hits[kind]
        return min(CALIBRATION.max_factor, (hits.hits + CALIBRATION.prior) / (hits.attempts + CALIBRATION.prior))
