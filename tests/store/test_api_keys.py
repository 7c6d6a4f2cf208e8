"""API keys: only hashes are kept, and what is revoked or expired stops working within seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from outrider.errors import InvalidRequest, NotFound, Overloaded, Unauthenticated
from outrider.store import api_keys as module
from outrider.store.api_keys import CACHE_S, Keys
from outrider.store.redis.client import connect
from outrider.store.redis.redis_clock import RedisClock


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with connect(redis_url) as client:
        yield client


async def test_a_key_names_its_tenant_and_its_secret_is_nowhere_in_redis(redis: Redis) -> None:
    keys = Keys(redis)
    secret, key = await keys.add("acme", "ci")
    assert len(secret) > 32
    assert (key.tenant, key.name, key.expires) == ("acme", "ci", None)
    assert await Keys(redis).find(secret) == key
    assert await keys.listed() == [key]
    everything = [await redis.dump(name) for name in await redis.keys()]
    assert everything
    assert not any(secret.encode()[9:25] in blob for blob in everything)


@pytest.mark.parametrize("wrong", ["", "outrider_", "x" * 10_000, "é"])
async def test_a_malformed_key_is_refused(redis: Redis, wrong: str) -> None:
    keys = Keys(redis)
    await keys.add("acme")
    with pytest.raises(Unauthenticated):
        await keys.find(wrong)


async def test_unknown_expired_and_revoked_keys_are_refused_with_one_text(redis: Redis) -> None:
    keys = Keys(redis)
    expired, _ = await keys.add("acme", valid_s=0.001)
    revoked, key = await keys.add("acme")
    await keys.revoke(key.key_id)
    await asyncio.sleep(0.01)
    texts = set()
    for secret in ("outrider_unknown", expired, revoked):
        with pytest.raises(Unauthenticated) as caught:
            await keys.find(secret)
        texts.add(str(caught.value))
    assert len(texts) == 1


async def test_a_cached_key_stops_working_at_its_expiry_and_soon_after_its_revocation(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = RedisClock()
    cached, elsewhere = Keys(redis, clock), Keys(redis)
    short, _ = await elsewhere.add("acme", valid_s=60)
    lasting, key = await elsewhere.add("acme")
    await cached.find(short)
    await cached.find(lasting)
    await elsewhere.revoke(key.key_id)
    assert (await cached.find(lasting)).tenant == "acme"  # as it was a moment ago

    now, begun = time.monotonic(), time.time()
    monkeypatch.setattr(module.time, "monotonic", lambda: now + CACHE_S + 0.1)
    monkeypatch.setattr(clock, "now", lambda: begun + 61)
    for secret in (short, lasting):
        with pytest.raises(Unauthenticated):
            await cached.find(secret)


async def test_a_key_is_looked_up_once_in_a_while_and_not_for_every_call(redis: Redis) -> None:
    keys = Keys(redis)
    secret, _ = await keys.add("acme")

    async def commands() -> int:
        return (await redis.info("commandstats")).get("cmdstat_hget", {}).get("calls", 0)

    before = await commands()
    for _ in range(200):
        await keys.find(secret)
    assert await commands() - before <= 2


@pytest.mark.parametrize("tenant", ["", "a b", "-a", "a/b", "a" * 65, "é"])
async def test_a_tenant_has_a_plain_name(redis: Redis, tenant: str) -> None:
    with pytest.raises(InvalidRequest, match="tenant"):
        await Keys(redis).add(tenant)


async def test_an_unknown_key_cannot_be_revoked(redis: Redis) -> None:
    with pytest.raises(NotFound, match="outrider keys list"):
        await Keys(redis).revoke("0" * 12)


async def test_lookups_of_unknown_keys_are_bounded_and_do_not_delay_known_ones(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LOOKUPS", 2)
    monkeypatch.setattr(module, "CACHE_S", -1.0)  # known, and looked up again nevertheless
    keys = Keys(redis)
    secret, _ = await keys.add("acme")
    await keys.find(secret)
    unknown = [asyncio.create_task(keys.find(f"outrider_{number}")) for number in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await keys.find("outrider_further")
    assert (await keys.find(secret)).tenant == "acme"
    assert all(isinstance(error, Unauthenticated) for error in await asyncio.gather(*unknown, return_exceptions=True))
    with pytest.raises(Unauthenticated):
        await keys.find("outrider_further")
