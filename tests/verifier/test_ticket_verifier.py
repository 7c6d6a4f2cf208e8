"""An upstream reads the routers' keys when a ticket needs them, at a bounded rate, and keeps those that still count."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from outrider.errors import Forbidden, Unavailable
from outrider.upstream.ticket_verifier import TicketVerifier
from outrider.wire.tickets import Permit, TicketSigner

PERMIT = Permit("session", "tenant", "drafter-1", "verifier-1", 3)
ROUTER = TicketSigner(time.time)


def ticket(signer: TicketSigner = ROUTER, valid_s: float = 60.0) -> bytes:
    return signer.sign(PERMIT, valid_s)


class Listed:
    """The listed keys, as a Redis gives them; None: it is away."""

    def __init__(self) -> None:
        self.keys: dict[bytes, float] | None = {}
        self.now = time.time()
        self.readings: list[int] = []  # numbers of those that have ended
        self.begun = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()
        self.done = asyncio.Event()

    async def read(self) -> dict[bytes, float]:
        self.begun.set()
        await self.open.wait()
        if self.keys is None:
            raise Unavailable("Redis is away")
        return self.keys

    def on_read(self, number: int) -> None:
        self.readings.append(number)
        self.done.set()

    async def next_reading(self) -> None:
        await self.done.wait()
        self.done.clear()


@asynccontextmanager
async def verifying(listed: Listed) -> AsyncIterator[TicketVerifier]:
    verifier = TicketVerifier(listed.read, lambda: listed.now)
    running = asyncio.create_task(verifier.run(listed.on_read))
    try:
        yield verifier
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_many_tickets_with_unknown_keys_cause_one_read_of_the_key_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider.upstream.ticket_verifier.MIN_READ_S", 3600.0)
    listed = Listed()
    async with verifying(listed) as verifier:
        for _ in range(20):
            assert verifier.request_reading(ticket(TicketSigner(time.time)))
            await asyncio.sleep(0)
        await listed.next_reading()
        for _ in range(20):
            assert verifier.request_reading(ticket(TicketSigner(time.time))) == 2
            await asyncio.sleep(0)
        assert listed.readings == [1]


async def test_malformed_tickets_and_known_keys_need_no_read_of_the_key_list() -> None:
    listed = Listed()
    listed.keys = {ROUTER.public_key: time.time() + 60}
    async with verifying(listed) as verifier:
        for junk in (b"", b"\xff", b"none"):
            assert verifier.request_reading(junk) is None
            with pytest.raises(Forbidden):
                verifier.check(junk, PERMIT)
        assert verifier.request_reading(ticket()) == 1
        with pytest.raises(Forbidden, match="forged"):
            verifier.check(ticket(), PERMIT)
        await listed.next_reading()
        assert verifier.request_reading(ticket()) is None
        verifier.check(ticket(), PERMIT)
        assert listed.readings == [1]


async def test_a_ticket_that_arrives_during_a_key_read_waits_for_the_next_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider.upstream.ticket_verifier.MIN_READ_S", 0.0)
    listed = Listed()
    listed.open.clear()
    async with verifying(listed) as verifier:
        assert verifier.request_reading(ticket(TicketSigner(time.time))) == 1
        await listed.begun.wait()
        assert verifier.request_reading(ticket()) == 2
        listed.open.set()
        await listed.next_reading()
        listed.keys = {ROUTER.public_key: time.time() + 60}
        while 2 not in listed.readings:
            await listed.next_reading()
        verifier.check(ticket(), PERMIT)


async def test_a_key_is_valid_until_its_expiry_even_if_redis_lost_it_or_is_down(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("outrider.upstream.ticket_verifier.MIN_READ_S", 0.0)
    listed = Listed()
    end = listed.now + 3600
    listed.keys = {ROUTER.public_key: end}
    async with verifying(listed) as verifier:
        verifier.request_reading(ticket())
        await listed.next_reading()
        lasting = ticket(valid_s=7200)
        for lost in ({}, None, None):
            listed.keys = lost
            verifier.request_reading(ticket(TicketSigner(time.time)))
            await listed.next_reading()
            verifier.check(lasting, PERMIT)
        assert [record.message for record in caplog.records] == [
            "the routers' ticket keys cannot be read: Redis is away"
        ]
        listed.now = end + 0.001
        assert verifier.request_reading(lasting)
        with pytest.raises(Forbidden, match="forged"):
            verifier.check(lasting, PERMIT)
