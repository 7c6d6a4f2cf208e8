"""Backoff: the growing pauses before a process that ended is started again."""

from __future__ import annotations

import asyncio

PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)  # before the first restart, the second, and so on; the last one repeats
STEADY_S = 60.0  # a process that ran longer starts again with the first pause


class Backoff:
    """The pauses before the restarts of one process, each longer than the one before."""

    def __init__(self) -> None:
        self.attempts = 0  # restarts since the process last ran longer than STEADY_S

    def ended_after(self, seconds: float) -> None:
        """Reset the pauses if the process ran longer than STEADY_S."""
        if seconds > STEADY_S:
            self.attempts = 0

    async def wait(self) -> None:
        """Wait for the next pause."""
        pause = PAUSES_S[min(self.attempts, len(PAUSES_S) - 1)]
        self.attempts += 1
        await asyncio.sleep(pause)
