"""Tickets of an upstream that attaches its drafters itself, without a router."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from outrider.wire.tickets import Permit, TicketSigner
from outrider.wire.tickets import check as check_ticket


class OwnTickets:
    """Signs the tickets that it gives drafters along, and admits no others."""

    def __init__(self) -> None:
        self._signer = TicketSigner(time.time)

    def sign(self, permit: Permit) -> bytes:
        """Return a ticket, which is valid for `TICKET_S`."""
        return self._signer.sign(permit)

    def check(self, ticket: bytes, permit: Permit) -> None:
        """Raise Forbidden unless this upstream has signed a ticket for this permit."""
        check_ticket(lambda key: key == self._signer.public_key, ticket, permit, time.time)

    def request_reading(self, ticket: bytes) -> None:
        """No ticket waits for a key."""

    async def run(self, on_read: Callable[[int], None]) -> None:
        """Run until cancelled."""
        await asyncio.Event().wait()
