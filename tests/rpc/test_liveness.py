"""Who is silent or stuck is taken for dead, in time."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from outrider.errors import Unavailable
from outrider.rpc import liveness
from outrider.v1 import types_pb2


async def said(*pauses: float) -> AsyncIterator[int]:
    for number, pause in enumerate(pauses):
        await asyncio.sleep(pause)
        yield number


async def test_messages_pass_and_the_end_is_an_end() -> None:
    assert [message async for message in liveness.heard(said(0, 0.01, 0), "it", 1.0)] == [0, 1, 2]


async def test_silence_is_an_error_that_names_the_peer() -> None:
    messages = liveness.heard(said(0, 60), "drafter x", 0.05)
    assert await anext(messages) == 0
    with pytest.raises(Unavailable, match=r"drafter x has been silent for 0\.05 s"):
        await anext(messages)


async def test_cancelling_the_reader_is_not_silence() -> None:
    async def read() -> None:
        async for _ in liveness.heard(said(60), "it", 30):
            pass

    reader = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader


def test_a_step_that_runs_for_too_long_is_stuck() -> None:
    liveness.check(types_pb2.Heartbeat(steps=3, running_ms=29_000), "it")
    with pytest.raises(Unavailable, match="it has been in one step for 31 s"):
        liveness.check(types_pb2.Heartbeat(steps=3, running_ms=31_000), "it")


async def test_progress_counts_steps_and_says_how_long_one_runs() -> None:
    progress = liveness.Progress()
    assert progress.heartbeat() == types_pb2.Heartbeat()
    progress.begin()
    await asyncio.sleep(0.02)
    assert progress.running
    assert 15 <= progress.heartbeat().running_ms < 5000
    progress.end()
    assert progress.heartbeat() == types_pb2.Heartbeat(steps=1)
