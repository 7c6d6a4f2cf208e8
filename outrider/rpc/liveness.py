"""Heartbeats: gRPC answers pings even while the program behind it is stuck, so processes report their progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

from outrider.errors import Stalled, Unavailable
from outrider.wire import types as wire

HEARTBEAT_S = 0.5  # the longest silence of a live peer
SILENCE_S = 2.5  # a peer that is silent for this time counts as dead
STUCK_S = 30.0  # a step that runs for this time counts as stuck

MessageT = TypeVar("MessageT")


class WorkClock:
    """Counts a loop's steps, for its heartbeats."""

    def __init__(self) -> None:
        self.steps = 0
        self._began: float | None = None

    @property
    def running(self) -> bool:
        """Whether a step runs."""
        return self._began is not None

    def begin(self) -> None:
        """Mark the begin of a step."""
        self._began = time.monotonic()

    def end(self) -> None:
        """Mark the end of a step."""
        self._began = None
        self.steps += 1

    def heartbeat(self) -> wire.Heartbeat:
        """Return the heartbeat: the steps so far, and how long the present one has run."""
        running = 0.0 if self._began is None else time.monotonic() - self._began
        return wire.Heartbeat(steps=self.steps, running_ms=round(running * 1000))


async def monitored(
    messages: AsyncIterator[MessageT], peer: str, within_s: float = SILENCE_S
) -> AsyncGenerator[MessageT, None]:
    """Yield the messages of a peer. Raises Stalled, naming `peer`, when it is silent for `within_s` seconds, and
    Unavailable when a server has sent bytes that do not parse: gRPC gives None for these.

    If this process itself stood still, it could not receive messages; the peer then gets `within_s` seconds once more.
    """
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + within_s
        try:
            async with asyncio.timeout(None) as limit:
                expiry = loop.call_at(due, _expire, limit, due, within_s)
                try:
                    message = await anext(messages)
                finally:
                    expiry.cancel()
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise silent(peer, within_s) from None
        if message is None:
            raise Unavailable(f"{peer} has sent bytes that are no message of this protocol")
        yield message


def silent(peer: str, for_s: float) -> Stalled:
    """Return the error for a peer that has been silent for `for_s` seconds."""
    return Stalled(f"{peer} has been silent for {for_s:g} s; it is taken for dead")


def _expire(limit: asyncio.Timeout, due: float, within_s: float) -> None:
    now = asyncio.get_running_loop().time()
    limit.reschedule(now + within_s if now - due > HEARTBEAT_S else now)


def check_heartbeat(heartbeat: wire.Heartbeat, peer: str) -> None:
    """Raise Stalled when the sender's step is stuck."""
    if heartbeat.running_ms > STUCK_S * 1000:
        raise Stalled(f"{peer} has been in one step for {heartbeat.running_ms // 1000} s; it is taken to be stuck")
