"""Redis' clock, by which every moment counts that one machine writes and another one reads: the clocks of two machines
may differ by minutes. Times within one process are by its monotonic clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from redis.asyncio import RedisCluster

from outrider.store.redis.client import Client, redis_errors

MAX_READ_S = 0.25  # a reply that took longer does not correct an earlier one: it says too little about the moment

_KEY = "outrider:{workers}"  # in a Redis Cluster the node that holds the registry has the clock


class RedisClock:
    """Redis' time as last read, carried on by this process' monotonic clock; this machine's until it was read."""

    def __init__(self, wall: Callable[[], float] | None = None) -> None:
        """`wall` returns this machine's time, in seconds since 1970; None: `time.time`."""
        self._wall = wall or wall_time
        self._offset: float | None = None  # seconds by which Redis' clock is ahead of the monotonic one

    def now(self) -> float:
        """Return Redis' time, in seconds since 1970."""
        return self._wall() if self._offset is None else self._offset + time.monotonic()

    def skew_s(self) -> float:
        """Return the seconds by which this machine's clock is ahead of Redis'; 0 until that was read."""
        return 0.0 if self._offset is None else self._wall() - self.now()

    async def read(self, redis: Client) -> None:
        """Ask Redis for its time. Raises Unavailable when Redis cannot be used or does not permit it."""
        began = time.monotonic()
        with redis_errors(redis):
            if isinstance(redis, RedisCluster):
                await redis.initialize()
                reply: Any = await redis.time(target_nodes=redis.get_node_from_key(_KEY))
            else:
                reply = await redis.time()
        now = time.monotonic()
        if self._offset is None or now - began <= MAX_READ_S:
            seconds, microseconds = reply
            self._offset = seconds + microseconds / 1e6 - (began + now) / 2


def wall_time() -> float:
    """Return this machine's time, in seconds since 1970."""
    return time.time()
