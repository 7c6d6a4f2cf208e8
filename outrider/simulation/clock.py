"""A simulated clock that runs events in the order of their times."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """The simulated time, in seconds, and the events to come."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Schedule an event `seconds` from now."""
        heapq.heappush(self._events, (self.now + seconds, next(self._count), event))

    def run(self, until: float) -> None:
        """Run all events up to the time `until`, and set the clock to it."""
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = until
