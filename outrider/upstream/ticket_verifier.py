"""Checks tickets with the public keys that routers list in Redis."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from outrider.errors import Forbidden, Unavailable
from outrider.wire.tickets import PUBLIC_KEY_BYTES, Permit, key_of
from outrider.wire.tickets import check as check_ticket

MIN_READ_S = 1.0  # least time between two readings of the keys, however many tickets name unknown ones

log = logging.getLogger(__name__)


class TicketVerifier:
    """The routers' public keys, read when a ticket names one that is not known.

    A key counts until the time that was listed with it, also while Redis is away and after Redis has lost it.
    """

    def __init__(self, read: Callable[[], Awaitable[Mapping[bytes, float]]], now: Callable[[], float]) -> None:
        """`read` returns the listed keys, each with the time until which it counts, in seconds since 1970; `now` the
        time by the same clock: Redis'."""
        self._read = read
        self._now = now
        self._keys: dict[bytes, float] = {}
        self._readings = 0  # readings that have begun
        self._wanted = asyncio.Event()

    def check(self, ticket: bytes, permit: Permit) -> None:
        """Raise Forbidden unless the ticket grants this permit."""
        check_ticket(self._trusts, ticket, permit, self._now)

    def request_reading(self, ticket: bytes) -> int | None:
        """Have the keys read again if the ticket's key is not known. Return the number of that reading; None: the
        ticket can be checked now."""
        try:
            key = key_of(ticket)
        except Forbidden:
            return None
        if len(key) != PUBLIC_KEY_BYTES or self._trusts(key):
            return None
        self._wanted.set()
        return self._readings + 1  # a reading that runs may have begun before the key was listed

    async def run(self, on_read: Callable[[int], None]) -> None:
        """Read the keys whenever a reading is requested. Run until cancelled; `on_read` is called after each reading,
        with its number, also if Redis could not be read."""
        reachable = True
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            self._readings += 1
            number = self._readings
            try:
                listed = await self._read()
                reachable = True
            except Unavailable as error:
                listed = {}
                if reachable:
                    log.warning("the routers' ticket keys cannot be read: %s", error)
                reachable = False
            now = self._now()
            self._keys = {key: until for key, until in (self._keys | dict(listed)).items() if until > now}
            on_read(number)
            await asyncio.sleep(MIN_READ_S)

    def _trusts(self, key: bytes) -> bool:
        return self._keys.get(key, 0.0) > self._now()
