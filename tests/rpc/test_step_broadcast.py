"""Watchers of a session's steps: a slow one misses steps and holds up nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from outrider.errors import NotFound
from outrider.rpc.step_broadcast import MAX_QUEUED, StepBroadcast
from outrider.v1.types_pb2 import StepTree


def begun(broadcast: StepBroadcast) -> tuple[AsyncIterator[StepTree], asyncio.Task[StepTree]]:
    """A watcher that waits for its first step."""
    steps = broadcast.steps()
    return steps, asyncio.ensure_future(anext(steps))


async def test_a_slow_watcher_misses_steps_and_the_next_one_has_their_number() -> None:
    broadcast = StepBroadcast()
    async with aclosing(broadcast.steps()) as slow, aclosing(broadcast.steps()) as quick:
        firsts = [asyncio.create_task(anext(steps)) for steps in (slow, quick)]
        await asyncio.sleep(0)
        broadcast.show(StepTree(position=0))
        await asyncio.gather(*firsts)
        for position in range(1, MAX_QUEUED + 4):  # three more than wait for `slow`; the last one missed five before
            broadcast.show(StepTree(position=position, missed=5 if position == MAX_QUEUED + 3 else 0))
            assert (await anext(quick)).position == position
        queued = [await anext(slow) for _ in range(MAX_QUEUED)]
        assert [(step.position, step.missed) for step in queued] == [(at, 0) for at in range(1, MAX_QUEUED + 1)]
        last = StepTree(position=99, missed=1)
        broadcast.show(last)
        assert [(await anext(steps)).missed for steps in (slow, quick)] == [3 + 5 + 1, 1]
        assert last.missed == 1
    assert not broadcast.watched


@pytest.mark.parametrize("error", [None, NotFound("no such session")])
async def test_the_end_follows_the_queued_steps(error: NotFound | None) -> None:
    broadcast = StepBroadcast()
    steps, first = begun(broadcast)
    await asyncio.sleep(0)
    assert broadcast.watched
    for position in range(2):
        broadcast.show(StepTree(position=position))
    broadcast.close(error)
    broadcast.close()  # changes nothing
    assert (await first).position == 0
    assert (await anext(steps)).position == 1
    for ended in (steps, broadcast.steps()):  # also for who comes later
        with pytest.raises(StopAsyncIteration if error is None else NotFound):
            await anext(ended)
    assert not broadcast.watched
