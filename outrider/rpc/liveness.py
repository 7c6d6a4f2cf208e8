"""Heartbeats: gRPC answers pings while the program behind it is stuck, so the parts say themselves that they move."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

from outrider.errors import Unavailable
from outrider.v1 import types_pb2

HEARTBEAT_S = 0.5  # the longest that a live peer is silent
SILENCE_S = 2.5  # a peer that was silent for so long is taken for dead
STUCK_S = 30.0  # a step that runs for so long is taken to be stuck

MessageT = TypeVar("MessageT")


class Progress:
    """Counts a loop's steps, for its heartbeats."""

    def __init__(self) -> None:
        self.steps = 0
        self._began: float | None = None

    @property
    def running(self) -> bool:
        """Whether a step runs."""
        return self._began is not None

    def begin(self) -> None:
        """A step begins."""
        self._began = time.monotonic()

    def end(self) -> None:
        """It has ended."""
        self._began = None
        self.steps += 1

    def heartbeat(self) -> types_pb2.Heartbeat:
        """How it goes."""
        running = 0.0 if self._began is None else time.monotonic() - self._began
        return types_pb2.Heartbeat(steps=self.steps, running_ms=round(running * 1000))


async def heard(
    messages: AsyncIterator[MessageT], who: str, within_s: float = SILENCE_S
) -> AsyncGenerator[MessageT, None]:
    """The messages of a peer. Raises Unavailable, naming `who`, when it is silent for `within_s` seconds, or a server
    has sent bytes that do not parse: for these gRPC gives None.

    Whoever stood still itself has not heard that the peer was silent: it listens for so long once more.
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
            raise Unavailable(f"{who} has been silent for {within_s:g} s; it is taken for dead") from None
        if message is None:
            raise Unavailable(f"{who} has sent bytes that are no message of this protocol")
        yield message


def _expire(limit: asyncio.Timeout, due: float, within_s: float) -> None:
    now = asyncio.get_running_loop().time()
    limit.reschedule(now + within_s if now - due > HEARTBEAT_S else now)


def check(heartbeat: types_pb2.Heartbeat, who: str) -> None:
    """Raises Unavailable when the sender's step is stuck."""
    if heartbeat.running_ms > STUCK_S * 1000:
        raise Unavailable(f"{who} has been in one step for {heartbeat.running_ms // 1000} s; it is taken to be stuck")
