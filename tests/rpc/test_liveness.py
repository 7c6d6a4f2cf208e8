"""A silent peer is distinguished from a process that stood still itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from outrider.errors import Unavailable
from outrider.rpc.liveness import HEARTBEAT_S, STUCK_S, check_heartbeat, monitored
from outrider.v1 import types_pb2

WITHIN_S = 0.2


async def arriving(queue: asyncio.Queue[str]) -> AsyncIterator[str]:
    while (message := await queue.get()) != "end":
        yield message


async def test_a_silent_peer_is_declared_dead_and_an_ended_one_is_not() -> None:
    queue: asyncio.Queue[str] = asyncio.Queue()
    messages = monitored(arriving(queue), "it", WITHIN_S)
    queue.put_nowait("a")
    assert await anext(messages) == "a"
    began = time.monotonic()
    with pytest.raises(Unavailable, match=r"it has been silent for 0\.2 s"):
        await anext(messages)
    assert WITHIN_S - 0.01 < time.monotonic() - began < WITHIN_S + HEARTBEAT_S
    queue.put_nowait("end")
    assert [message async for message in monitored(arriving(queue), "it", WITHIN_S)] == []


async def test_a_process_that_was_stopped_listens_once_more_and_no_longer() -> None:
    queue: asyncio.Queue[str] = asyncio.Queue()
    messages = monitored(arriving(queue), "it", WITHIN_S)
    listening = asyncio.ensure_future(anext(messages))
    await asyncio.sleep(0)
    time.sleep(WITHIN_S + 2 * HEARTBEAT_S)  # noqa: ASYNC251 - the process is stopped, and goes on
    asyncio.get_running_loop().call_later(WITHIN_S / 2, queue.put_nowait, "late")
    assert await listening == "late"
    listening = asyncio.ensure_future(anext(messages))
    await asyncio.sleep(0)
    time.sleep(WITHIN_S + 2 * HEARTBEAT_S)  # noqa: ASYNC251
    with pytest.raises(Unavailable):
        await listening


async def test_bytes_that_are_no_message_are_the_end_of_a_peer() -> None:
    async def broken() -> AsyncIterator[str | None]:
        yield "a"
        yield None  # what gRPC gives for them

    messages = monitored(broken(), "it", WITHIN_S)
    assert await anext(messages) == "a"
    with pytest.raises(Unavailable, match="it has sent bytes that are no message"):
        await anext(messages)


def test_a_peer_is_stuck_that_is_in_one_step_for_half_a_minute() -> None:
    most = round(STUCK_S * 1000)
    check_heartbeat(types_pb2.Heartbeat(steps=3, running_ms=most), "it")
    with pytest.raises(Unavailable, match="it has been in one step for 30 s"):
        check_heartbeat(types_pb2.Heartbeat(steps=3, running_ms=most + 1), "it")
