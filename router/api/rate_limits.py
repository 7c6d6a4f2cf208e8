"""Measures how long slots are held, and limits the rates of tenants."""

from __future__ import annotations

from collections.abc import Callable

from outrider.core.stats import Ema

EMA_WEIGHT = 0.1  # weight of one generation in the mean
MAX_TENANTS = 4096  # tenants whose buckets are kept


class ResidencyEma:
    """The mean time for which generations hold their slots, an exponential moving average.

    The expected wait follows from it by Little's law, also when few generations came lately: counting freed slots would
    take an idle hour for a slow cluster.
    """

    def __init__(self) -> None:
        self._seconds = Ema(EMA_WEIGHT)

    def observe(self, seconds: float) -> None:
        """Add the time for which a generation held its slot."""
        self._seconds.observe(seconds)

    def wait_s(self, ahead: int, places: int) -> float | None:
        """Return the expected wait in seconds for one of so many slots behind `ahead` others; None before the first
        measurement."""
        return (ahead + 1) * self._seconds.mean / max(1, places) if self._seconds.count else None


class TokenBuckets:
    """A token bucket for each tenant: full at first, refilled at a rate, holding at most `capacity`.

    A cost that is known only afterwards may be taken afterwards: a level can be negative.
    """

    def __init__(self, per_s: float, capacity: float, clock: Callable[[], float]) -> None:
        self._per_s = per_s
        self._capacity = capacity
        self._clock = clock
        self._levels: dict[str, tuple[float, float]] = {}  # by tenant: level, and the time of that level

    def wait_s(self, tenant: str, amount: float) -> float:
        """Return the seconds until the bucket holds `amount`; 0 if it does."""
        return max(0.0, (min(amount, self._capacity) - self._level(tenant)) / self._per_s)

    def take(self, tenant: str, amount: float) -> None:
        """Take `amount`, even below zero; a negative amount gives back."""
        self._levels[tenant] = (min(self._capacity, self._level(tenant) - amount), self._clock())
        if len(self._levels) > MAX_TENANTS:  # full buckets need no entry
            self._levels = {name: self._levels[name] for name in self._levels if self._level(name) < self._capacity}

    def _level(self, tenant: str) -> float:
        level, since = self._levels.get(tenant, (self._capacity, 0.0))
        return min(self._capacity, level + (self._clock() - since) * self._per_s)
