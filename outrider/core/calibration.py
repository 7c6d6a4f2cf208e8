"""What a drafter's scores are worth, by what became of its nodes."""

from __future__ import annotations

import math
from bisect import bisect_right

# Bounds of the classes of claims, as minus the logarithm of the claimed chance: fine near certainty.
BOUNDS = (0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0)
PRIOR = 8.0  # successes' worth of trust in a drafter that nothing is known of
MEMORY = 0.995  # weight of a class's past at each observation
LEAST, MOST = 1 / 64, 4.0  # bounds of the correction


class Calibration:
    """Corrects one drafter's edge scores so that they say how often its nodes are the target's token.

    In each class of claims the correction is hits / claimed hits, both with a prior that trusts the drafter. An honest
    drafter's scores stay as they are; a boastful one's fall until they are true, whatever it claims.
    """

    def __init__(self) -> None:
        self._hits = [0.0] * (len(BOUNDS) + 1)
        self._claims = [0.0] * (len(BOUNDS) + 1)

    def observe(self, claimed: float, hit: bool) -> None:
        """A verified node whose parent was on the target's path, with the logarithm of its claimed chance."""
        kind = bisect_right(BOUNDS, -claimed)
        self._hits[kind] = MEMORY * self._hits[kind] + hit
        self._claims[kind] = MEMORY * self._claims[kind] + math.exp(claimed)

    def corrected(self, claimed: float) -> float:
        """The logarithm of the chance that a claim stands for; at most 0."""
        kind = bisect_right(BOUNDS, -claimed)
        factor = (self._hits[kind] + PRIOR) / (self._claims[kind] + PRIOR)
        return min(0.0, claimed + math.log(min(MOST, max(LEAST, factor))))
