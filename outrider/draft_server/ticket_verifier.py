"""Checks tickets with the cluster's ticket key."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from outrider.errors import Forbidden, OutriderError
from outrider.rpc.tickets import Permit
from outrider.rpc.tickets import check as check_ticket

KEY_AGE_S = 1.0  # least time between two reads of the key; a ticket that does not fit it causes one

log = logging.getLogger(__name__)


class TicketVerifier:
    """The cluster's ticket key, read again when a ticket does not fit it: Redis may have lost the key and got a new
    one.
    """

    def __init__(self, key: bytes, read: Callable[[], Awaitable[bytes]]) -> None:
        self._key = key
        self._read = read
        self._read_at = time.monotonic()
        self._reading: asyncio.Task[None] | None = None

    def check(self, ticket: bytes, permit: Permit) -> None:
        """Raises Forbidden unless the ticket grants this permit."""
        try:
            check_ticket(self._key, ticket, permit)
        except Forbidden:
            idle = self._reading is None or self._reading.done()  # one read at a time, even if Redis does not answer
            if idle and time.monotonic() - self._read_at > KEY_AGE_S:
                self._read_at = time.monotonic()
                self._reading = asyncio.create_task(self._refresh())
            raise

    async def _refresh(self) -> None:
        try:
            self._key = await self._read()
        except OutriderError as error:
            log.warning("the ticket key cannot be read again: %s", error)
        except Exception:  # no caller awaits this task
            log.exception("the ticket key cannot be read again")
