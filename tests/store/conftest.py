"""A connection to the emptied server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from outrider.store.client import connect


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    assert isinstance(client, Redis)
    yield client
    await client.aclose()
