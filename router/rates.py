"""What is measured and limited over time: how long a place is kept, and what a tenant may ask for."""

from __future__ import annotations

from collections.abc import Callable

SMOOTHING = 0.1  # weight of one generation in the mean
TENANTS = 4096  # whose buckets are kept


class Stay:
    """How long generations keep their places: a moving mean.

    The rate at which places become free follows by Little's law, also where few came lately: counting those that became
    free would take a quiet hour for a slow cluster.
    """

    def __init__(self) -> None:
        self._mean_s: float | None = None

    def observe(self, seconds: float) -> None:
        """A generation gave its place back after so long."""
        self._mean_s = seconds if self._mean_s is None else self._mean_s + SMOOTHING * (seconds - self._mean_s)

    def wait_s(self, ahead: int, places: int) -> float | None:
        """When the one behind `ahead` others gets one of so many places; None while nothing is known."""
        if self._mean_s is None:
            return None
        return (ahead + 1) * self._mean_s / max(1, places)


class Buckets:
    """A token bucket for each tenant: full at first, filled at a rate, holding at most `most`.

    What is only known afterwards may be taken afterwards: a bucket can owe.
    """

    def __init__(self, per_s: float, most: float, clock: Callable[[], float]) -> None:
        self._per_s = per_s
        self._most = most
        self._clock = clock
        self._levels: dict[str, tuple[float, float]] = {}  # by tenant: level, and when

    def wait_s(self, tenant: str, wanted: float) -> float:
        """Until it holds so much; 0 if it does."""
        return max(0.0, (min(wanted, self._most) - self._level(tenant)) / self._per_s)

    def take(self, tenant: str, amount: float) -> None:
        """Takes so much, be it there or not; a negative amount gives back."""
        self._levels[tenant] = (min(self._most, self._level(tenant) - amount), self._clock())
        if len(self._levels) > TENANTS:  # a full one says nothing
            self._levels = {name: self._levels[name] for name in self._levels if self._level(name) < self._most}

    def _level(self, tenant: str) -> float:
        level, since = self._levels.get(tenant, (self._most, 0.0))
        return min(self._most, level + (self._clock() - since) * self._per_s)
