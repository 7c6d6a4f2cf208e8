"""Events of sessions: what is published reaches all that listen, who learn of gaps and of a server that is silent."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from outrider.errors import Unavailable
from outrider.store import session_events
from outrider.store.redis.client import Client, connect
from outrider.store.redis.embedded import EmbeddedRedis
from outrider.store.session_events import SessionEvent, SessionEvents


async def test_a_published_event_reaches_every_listener(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_events, "PING_S", 0.05)
    events = SessionEvents(client)
    async with aclosing(events.listen()) as first, aclosing(events.listen()) as second:
        assert await anext(first) is await anext(second) is None
        await events.publish("s1", "host:7071/a b")
        await events.publish("s1")
        for listening in (first, second):
            assert await anext(listening) == SessionEvent("s1", "host:7071/a b")
            assert await anext(listening) == SessionEvent("s1", "")
        later = asyncio.ensure_future(anext(first))
        await asyncio.sleep(0.4)  # pings are answered
        await events.publish("s2", "v2")
        assert await later == SessionEvent("s2", "v2")


async def test_a_lost_connection_is_a_gap_and_a_silent_server_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_events, "PING_S", 0.2)
    with EmbeddedRedis() as server:
        client = connect(server.url)
        try:
            async with aclosing(SessionEvents(client).listen()) as events:
                assert await anext(events) is None
                await client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
                assert await anext(events) is None  # subscribed again
                await client.execute_command("CLIENT", "PAUSE", "60000", "ALL")
                with pytest.raises(Unavailable, match="does not answer"):
                    await asyncio.wait_for(anext(events), 5)
        finally:
            await client.aclose()
