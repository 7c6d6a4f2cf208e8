"""Backoff: growing pauses between attempts at something that fails."""

from __future__ import annotations

import asyncio
import math


def pause_s(attempt: int, first_s: float, longest_s: float) -> float:
    """Return the pause after `attempt` earlier ones, in seconds: each is twice the one before, up to the longest."""
    return min(longest_s, first_s * 2.0 ** min(attempt, 30))


class Backoff:
    """The pauses of one sequence of attempts. What then ran for longer than `steady_s` begins with the first again."""

    def __init__(self, first_s: float, longest_s: float, *, steady_s: float = math.inf) -> None:
        self.attempts = 0  # pauses since the first
        self._first_s = first_s
        self._longest_s = longest_s
        self._steady_s = steady_s

    @property
    def next_s(self) -> float:
        """The next pause, in seconds."""
        return pause_s(self.attempts, self._first_s, self._longest_s)

    def ended_after(self, seconds: float) -> None:
        """Begin with the first pause again if the last attempt ran for long."""
        if seconds > self._steady_s:
            self.attempts = 0

    async def wait(self) -> None:
        """Wait for the next pause."""
        pause = self.next_s
        self.attempts += 1
        await asyncio.sleep(pause)
