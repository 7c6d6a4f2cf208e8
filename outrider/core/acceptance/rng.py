"""Random sources, which are passed to the rules: draws come from a seed, or a test enumerates all outcomes."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.core.session.digest import MASK, PHI, mix64

FloatRow = NDArray[np.float64]

DRAFT, VERIFY = 0xD4AF7, 0x5E71F7  # key parts: drafting and verification must never use the same draws


class RandomSource(Protocol):
    """Decides random events."""

    def happens(self, probability: float) -> bool:
        """Return True with that probability (0 to 1)."""

    def pick(self, weights: FloatRow) -> int:
        """Draw an index in proportion to `weights`, which are not negative and not all zero."""


class SeededRandom:
    """Draws 53 random bits at a time from a key; the same key gives the same draws on every machine."""

    def __init__(self, *key: int) -> None:
        """`key` holds all that draws must be independent by, for example seed, choice, epoch, position and purpose."""
        self._state = 0
        for part in key:
            self._state = mix64(self._state + (part + 1) * PHI)

    def skip(self, draws: int) -> None:
        """Pass over `draws` draws of one number each."""
        self._state = (self._state + draws * PHI) & MASK

    def happens(self, probability: float) -> bool:
        return self._uniform() < probability

    def pick(self, weights: FloatRow) -> int:
        cumulative = np.cumsum(weights)
        place = int(np.searchsorted(cumulative, self._uniform() * cumulative[-1], side="right"))
        return min(place, int(np.flatnonzero(weights)[-1]))  # rounding may lead beyond the last positive weight

    def _uniform(self) -> float:
        """Draw a number from 0 to 1, without 1."""
        self._state = (self._state + PHI) & MASK
        return (mix64(self._state) >> 11) * 2.0**-53
