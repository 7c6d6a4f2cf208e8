"""Connections to Redis that are lost: a write to a closed one is an error that is retried, on either event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis.exceptions
from redis.asyncio import Redis

from outrider.rpc.lifecycle import fast_event_loop
from outrider.store.redis.client import connect
from tests.store.cluster import redis_cluster

LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, fast_event_loop])


async def write_to_closed(redis_url: str) -> None:
    client = connect(redis_url)
    connection: Any
    if isinstance(client, Redis):
        connection = client.connection_pool.make_connection()
    else:
        await client.initialize()
        node = client.get_primaries()[0]
        connection = node.connection_class(**node.connection_kwargs)
    await connection.connect()
    connection._writer.transport.close()

    async def write() -> None:
        for _ in range(9):  # asyncio's own loop counts the first ones as sent
            await connection.send_command("PING")

    try:
        with pytest.raises(redis.exceptions.ConnectionError):
            await write()
    finally:
        await connection.disconnect()
        await client.aclose()


@LOOPS
def test_a_write_to_a_closed_connection_is_a_connection_error(
    redis_url: str, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(write_to_closed(redis_url))


@LOOPS
def test_a_write_to_a_closed_cluster_connection_is_a_connection_error(
    tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    with redis_cluster(tmp_path) as ports, asyncio.Runner(loop_factory=loop) as runner:
        runner.run(write_to_closed(f"redis+cluster://127.0.0.1:{ports[0]}"))
