"""Do tokens that were drawn follow the target's law? A test of their places in it (see `Reference.places`)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

LEVEL = 1e-4  # texts that follow the law fall below it once in ten thousand runs
_LEVEL_REACH = 2.226  # of the statistic times the root of the count, at that level
_TERMS = 100  # of the series; a few are enough but where p is near 1


def p_value(places: NDArray[np.float64]) -> float:
    """Of the hypothesis that the places are uniform on 0 to 1 (Kolmogorov and Smirnov); 1 for none.

    By Stephens' approximation of 1970, which is within 0.03 from ten observations on.
    """
    count = len(places)
    if not count:
        return 1.0
    ordered, below = np.sort(places), np.arange(count) / count
    distance = float(max((ordered - below).max(), (below + 1.0 / count - ordered).max()))
    root = math.sqrt(count)
    reach = (root + 0.12 + 0.11 / root) * distance
    if reach < 0.2:  # there the series needs more terms than it is worth
        return 1.0
    p = 2.0 * sum(math.copysign(math.exp(-2.0 * (k * reach) ** 2), k % 2 - 0.5) for k in range(1, _TERMS))
    return min(1.0, max(0.0, p))


def noticed(count: int) -> float:
    """About how far off a law must be, in the share of tokens that are among the likeliest, to show in `count`."""
    return min(1.0, _LEVEL_REACH / math.sqrt(count)) if count else 1.0
