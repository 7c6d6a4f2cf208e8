"""Tests whether sampled tokens follow the target's distribution, by their quantiles (see `Reference.quantiles`)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

LEVEL = 1e-4  # significance level: texts with the right distribution fall below it once in ten thousand runs
_LEVEL_REACH = 2.226  # the statistic times the root of the count, at that level
_TERMS = 100  # of the series; a few are enough unless p is near 1


def p_value(quantiles: NDArray[np.float64]) -> float:
    """Return the p-value of the hypothesis that the quantiles are uniform on 0 to 1; 1 for an empty array.

    The Kolmogorov-Smirnov test, by Stephens' approximation of 1970, which is within 0.03 from ten observations on.
    """
    count = len(quantiles)
    if not count:
        return 1.0
    ordered, below = np.sort(quantiles), np.arange(count) / count
    distance = float(max((ordered - below).max(), (below + 1.0 / count - ordered).max()))
    root = math.sqrt(count)
    reach = (root + 0.12 + 0.11 / root) * distance
    if reach < 0.2:  # the series converges slowly here, and p is 1 up to rounding
        return 1.0
    p = 2.0 * sum(math.copysign(math.exp(-2.0 * (k * reach) ** 2), k % 2 - 0.5) for k in range(1, _TERMS))
    return min(1.0, max(0.0, p))


def detectable_difference(count: int) -> float:
    """Return about the smallest deviation from the distribution that `count` tokens show, as a share of tokens."""
    return min(1.0, _LEVEL_REACH / math.sqrt(count)) if count else 1.0
