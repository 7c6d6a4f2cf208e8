"""The sums of the last minutes, for charts that begin before anybody looks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

EVERY_S = 1.0
KEPT = 180  # of the router's sums, the latest


class RecentSums:
    """Keeps what `take` returns, once a second."""

    def __init__(self, take: Callable[[], dict[str, Any]]) -> None:
        self._take = take
        self._taken: deque[dict[str, Any]] = deque(maxlen=KEPT)

    async def run(self) -> None:
        """Take the sums until cancelled."""
        while True:
            self._taken.append(self._take())
            await asyncio.sleep(EVERY_S)

    def page(self) -> list[dict[str, Any]]:
        """Return what is kept, oldest first. May be called in another thread."""
        return list(self._taken)
