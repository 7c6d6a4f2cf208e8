"""Bounds the drafters' streams that no ticket has admitted yet.

gRPC receives a message whole, up to 6 MiB, before any of it can be looked at. So only a few streams are read from
before a ticket has admitted them; the others wait, and whoever takes long makes room for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

from outrider.errors import Overloaded

PLACES = 8  # streams that are read from at the same time without having been admitted
WAITING = 64  # streams that wait for a place
ADMISSION_S = 10.0  # time to be admitted: a subscription may wait 5 s for its session
SHARE_S = 0.25  # time that a stream has even where others wait


class Entrance:
    """Gives streams a place until a ticket admits them, in the order in which they came."""

    def __init__(self) -> None:
        self._inside: dict[asyncio.Timeout, float] = {}  # when each came, by its deadline; the oldest is the first
        self._left = asyncio.Event()  # one that was inside has left
        self._next = asyncio.Lock()  # of the first of those that wait
        self._waiting = 0

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[Callable[[], None]]:
        """Wait for a place, and give what is to be called once a ticket has admitted the stream. Raises Overloaded
        where too many wait, and in the body where the ticket takes too long."""
        limit = await self._place()
        try:
            async with limit:
                yield partial(self._admit, limit)
        except TimeoutError:
            if not limit.expired():
                raise
            raise Overloaded("no ticket has admitted this stream in time; open it when there is one") from None
        finally:
            self._leave(limit)

    async def _place(self) -> asyncio.Timeout:
        if self._waiting >= WAITING:
            raise Overloaded(f"more than {WAITING} drafters' streams wait to be read from")
        self._waiting += 1
        try:
            async with self._next:
                while len(self._inside) >= PLACES:
                    await self._make_room()
                now = asyncio.get_running_loop().time()
                limit = asyncio.timeout_at(now + ADMISSION_S)
                self._inside[limit] = now
                return limit
        finally:
            self._waiting -= 1

    async def _make_room(self) -> None:
        """Wait until a stream has left; the oldest one must go once it has had its time."""
        oldest, came = next(iter(self._inside.items()))
        self._left.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(came + SHARE_S):
                await self._left.wait()
        if oldest in self._inside and not oldest.expired():
            oldest.reschedule(came)
            self._left.clear()
            await self._left.wait()

    def _admit(self, limit: asyncio.Timeout) -> None:
        if limit in self._inside and not limit.expired():
            limit.reschedule(None)
            self._leave(limit)

    def _leave(self, limit: asyncio.Timeout) -> None:
        if self._inside.pop(limit, None) is not None:
            self._left.set()
