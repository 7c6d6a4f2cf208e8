"""Slows down callers that are refused all the time."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from outrider.errors import Overloaded
from outrider.limits.concurrency_limit import ConcurrencyLimit
from outrider.limits.token_buckets import TokenBuckets

QUICK_PER_S = 16.0  # refusals of one caller that are not held; a second's worth may come together
HOLD_S = 1.0  # seconds for which further ones are held
MAX_HELD, MAX_HELD_OF_KEY = 256, 128  # most refusals held at the same time, in total and of a key; others are quick


class SlowRefusals:
    """Holds refusals for a moment where one caller, a tenant or an address, gets many.

    A refusal costs a server nearly as much as an answer, so a caller that is refused in a loop must be slowed down as
    well.
    """

    def __init__(self) -> None:
        self._quick = TokenBuckets(QUICK_PER_S, QUICK_PER_S, time.monotonic)
        self._held = ConcurrencyLimit("", MAX_HELD, of_key=MAX_HELD_OF_KEY)

    async def hold(self, key: str) -> None:
        """Wait, if this caller has been refused too often, before it is refused once more."""
        if self._quick.wait_s(key, 1.0) <= 0:
            self._quick.take(key, 1.0)
            return
        with suppress(Overloaded), self._held.hold(key):
            await pause()


async def pause() -> None:
    """Wait for as long as a refusal is held."""
    await asyncio.sleep(HOLD_S)
