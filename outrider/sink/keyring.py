"""The key that an upstream checks tickets with."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from outrider.errors import Forbidden, OutriderError
from outrider.rpc.tickets import Permit
from outrider.rpc.tickets import check as check_ticket

KEY_AGE_S = 1.0  # a ticket that does not fit the key has it read again at most this often

log = logging.getLogger(__name__)


class Keyring:
    """The cluster's ticket key, read again when tickets do not fit it: Redis may have lost it and got another."""

    def __init__(self, key: bytes, read: Callable[[], Awaitable[bytes]]) -> None:
        self._key = key
        self._read = read
        self._read_at = time.monotonic()
        self._reading: asyncio.Task[None] | None = None

    def check(self, ticket: bytes, permit: Permit) -> None:
        """Raises Forbidden unless the ticket permits this."""
        try:
            check_ticket(self._key, ticket, permit)
        except Forbidden:
            idle = self._reading is None or self._reading.done()  # a Redis that does not answer is asked once
            if idle and time.monotonic() - self._read_at > KEY_AGE_S:
                self._read_at = time.monotonic()
                self._reading = asyncio.create_task(self._refresh())
            raise

    async def _refresh(self) -> None:
        try:
            self._key = await self._read()
        except OutriderError as error:
            log.warning("the ticket key cannot be read again: %s", error)
        except Exception:  # nobody waits for this task
            log.exception("the ticket key cannot be read again")
