"""Chance, passed in: what a rule leaves to it can be drawn from a seed, or enumerated by a proof."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.core.digest import MASK, PHI, mix64

FloatRow = NDArray[np.float64]

DRAFT, VERIFY = 0xD4AF7, 0x5E71F7  # draws of drafts and of verdicts must never be the same


class Chance(Protocol):
    """Decides what has probabilities."""

    def happens(self, probability: float) -> bool:
        """Whether something of that probability (0 to 1) happens."""

    def pick(self, weights: FloatRow) -> int:
        """An index, in proportion to weights that are not negative and not all zero."""


class SeededChance:
    """Draws from a key, one after the other: 53 random bits each, the same on every machine."""

    def __init__(self, *key: int) -> None:
        """`key`: whatever the draws shall be independent by, for example seed, choice, epoch, position, and purpose."""
        self._state = 0
        for part in key:
            self._state = mix64(self._state + (part + 1) * PHI)

    def happens(self, probability: float) -> bool:
        return self._uniform() < probability

    def pick(self, weights: FloatRow) -> int:
        cumulative = np.cumsum(weights)
        place = int(np.searchsorted(cumulative, self._uniform() * cumulative[-1], side="right"))
        return min(place, int(np.flatnonzero(weights)[-1]))  # rounding may lead beyond the last that can be

    def _uniform(self) -> float:
        """0 to 1, without 1."""
        self._state = (self._state + PHI) & MASK
        return (mix64(self._state) >> 11) * 2.0**-53
