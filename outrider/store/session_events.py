"""Where sessions decode, published to all routers at the moment when it changes.

    outrider:session-events   channel: `ID WORKER` when a verifier begins to decode a session, `ID` and a space when the
                              session is closed

Redis keeps no messages: a router that was not subscribed reads the session's record.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from outrider.errors import Unavailable
from outrider.store.redis.client import Client, address_of, redis_errors

CHANNEL = "outrider:session-events"
PING_S = 10.0  # how long the channel is quiet before the connection is tried


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """A session begins to decode at a verifier, or is closed."""

    session_id: str
    verifier: str  # worker id; "": closed


class SessionEvents:
    """The channel. Methods raise Unavailable when Redis cannot be used."""

    def __init__(self, redis: Client) -> None:
        self._redis = redis

    async def publish(self, session_id: str, verifier: str = "") -> None:
        """Publish that a session begins to decode at a verifier or, without a verifier, that it is closed."""
        with redis_errors(self._redis):
            await self._redis.publish(CHANNEL, f"{session_id} {verifier}")

    async def listen(self) -> AsyncGenerator[SessionEvent | None, None]:
        """Yield events as they are published, and None each time that earlier ones may have been missed."""
        with redis_errors(self._redis):
            async with self._redis.pubsub() as pubsub:
                await pubsub.subscribe(CHANNEL)
                pinged = False
                while True:
                    message: Any = await pubsub.get_message(timeout=PING_S)
                    if message is not None:
                        pinged = False
                    elif pinged:
                        raise Unavailable(f"Redis at {address_of(self._redis)} does not answer")
                    else:
                        await pubsub.ping()
                        pinged = True
                        continue
                    if message["type"] == "subscribe":
                        yield None
                    elif message["type"] == "message":
                        session_id, _, verifier = message["data"].decode(errors="replace").partition(" ")
                        yield SessionEvent(session_id, verifier)
