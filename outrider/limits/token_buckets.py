"""Bounds how often something is done."""

from __future__ import annotations

from collections.abc import Callable

MAX_BUCKETS = 4096  # keys whose buckets are kept


class TokenBuckets:
    """A token bucket for each key: full at first, refilled at a rate, holding at most `capacity`.

    A cost that is known only afterwards may be taken afterwards: a level can be negative. Of more than MAX_BUCKETS the
    fullest are forgotten.
    """

    def __init__(self, per_s: float, capacity: float, clock: Callable[[], float]) -> None:
        self._per_s = per_s
        self._capacity = capacity
        self._clock = clock
        self._levels: dict[str, tuple[float, float]] = {}  # by key: level, and the time of that level

    def wait_s(self, key: str, amount: float) -> float:
        """Return the seconds until the bucket holds `amount`; 0 if it does."""
        return max(0.0, (min(amount, self._capacity) - self.level(key)) / self._per_s)

    def take(self, key: str, amount: float) -> None:
        """Take `amount`, even below zero; a negative amount gives back."""
        self._levels[key] = (min(self._capacity, self.level(key) - amount), self._clock())
        if len(self._levels) > MAX_BUCKETS:  # half of them go, so that this is seldom
            emptiest = sorted(self._levels, key=self.level)[: MAX_BUCKETS // 2]
            self._levels = {each: self._levels[each] for each in emptiest}

    def level(self, key: str) -> float:
        """Return what the bucket holds, negative for a debt."""
        level, since = self._levels.get(key, (self._capacity, 0.0))
        return min(self._capacity, level + (self._clock() - since) * self._per_s)
