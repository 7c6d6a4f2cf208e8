"""Drafters' streams that no ticket has admitted: few are read from at a time, and none keeps others out for long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.errors import Overloaded
from outrider.rpc.channels import open_channel
from outrider.rpc.tls import VERIFIER
from outrider.upstream import entrance, servicer
from outrider.v1.drafter_pb2_grpc import TreeSinkStub
from tests.verifier.test_drafter_ids import greeted, subscribed, upstream


@asynccontextmanager
async def silent(address: str) -> AsyncIterator[Any]:
    """A stream that says nothing."""
    async with open_channel(address, None, VERIFIER) as channel:
        call = TreeSinkStub(channel).Draft()
        await call.wait_for_connection()
        try:
            yield call
        finally:
            call.cancel()


async def test_streams_without_a_ticket_are_evicted_before_those_with_one() -> None:
    async with upstream(None) as (there, address), AsyncExitStack() as stack:
        admitted = await stack.enter_async_context(greeted(address, None, "admitted"))
        assert await subscribed(admitted, "admitted") == "snapshot"
        held = [
            await stack.enter_async_context(greeted(address, None, f"held-{number}"))
            for number in range(entrance.PLACES)
        ]
        began = time.monotonic()
        async with greeted(address, None, "honest") as call:
            assert await subscribed(call, "honest") == "snapshot"
        assert time.monotonic() - began < entrance.ADMISSION_S / 4
        assert await held[0].code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await subscribed(admitted, "admitted", 2) == "snapshot"
        assert {call.done() for call in held[1:]} == {False}  # one was enough
        assert there.servicer.streams == entrance.PLACES


async def test_a_stream_without_a_ticket_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance, "ADMISSION_S", 0.2)
    async with upstream(None) as (_, address), silent(address) as first, greeted(address, None, "held") as second:
        for call in (first, second):
            async with asyncio.timeout(5):
                assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "no ticket" in await second.details()


async def test_waiting_streams_are_bounded_and_enter_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance, "WAITING", 2)
    gate, came = entrance.Entrance(), list[int]()

    async def enter(number: int) -> None:
        async with gate.enter() as admit:
            came.append(number)
            await asyncio.sleep(0.01)
            admit()
            await asyncio.sleep(5)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(enter(number)) for number in range(entrance.PLACES + 2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="wait"):
            await enter(-1)
        while len(came) < len(tasks):
            await asyncio.sleep(0.005)
        for task in tasks:
            task.cancel()
    assert came == [*range(entrance.PLACES + 2)]


async def test_a_drafter_has_a_few_streams_at_a_time() -> None:
    async with upstream(None) as (_, address), AsyncExitStack() as stack:
        for number in range(servicer.MAX_STREAMS + 1):
            call = await stack.enter_async_context(greeted(address, None, "many"))
            received = await subscribed(call, "many")
            assert received == "snapshot" if number < servicer.MAX_STREAMS else "at most" in received
