"""How long to wait before something that ended is started again."""

from __future__ import annotations

import asyncio

PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)  # time after time
STEADY_S = 60.0  # what ran so long is started again as if it were the first time


class Pauses:
    """The pauses of one thing, each longer than the one before."""

    def __init__(self) -> None:
        self.taken = 0  # since it last ran for long

    def ran(self, seconds: float) -> None:
        """It ended after so long."""
        if seconds > STEADY_S:
            self.taken = 0

    async def take(self) -> None:
        """Waits."""
        pause = PAUSES_S[min(self.taken, len(PAUSES_S) - 1)]
        self.taken += 1
        await asyncio.sleep(pause)
