"""A task that is cancelled during a call to Redis ends, at whatever moment that is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from redis.asyncio import Redis

from outrider.errors import NotFound
from outrider.store.registry import Registry
from outrider.store.sessions import Sessions

MOMENTS = 60  # turns of the loop; a command takes a few
AGAIN = 10  # turns differ


async def _look_for_workers(client: Redis) -> None:
    await Registry(client).workers()


async def _look_for_a_session(client: Redis) -> None:
    with pytest.raises(NotFound):
        await Sessions(client, ttl_s=60, lease_s=5, resume_ttl_s=30).get("nobody")


@pytest.mark.parametrize("look", [_look_for_workers, _look_for_a_session])
async def test_a_task_that_queries_redis_continuously_ends_when_cancelled(
    client: Redis, look: Callable[[Redis], Awaitable[None]]
) -> None:
    asked = 0

    async def ask() -> None:
        nonlocal asked
        while True:
            await look(client)
            asked += 1

    for turns in [*range(MOMENTS)] * AGAIN:
        task = asyncio.create_task(ask())
        for _ in range(turns):
            await asyncio.sleep(0)
        before = asked
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asked <= before + 1  # the one that was under way may have come to its end
