"""All machines take Redis' time, however their own clocks are set."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from outrider.errors import Unauthenticated
from outrider.store.api_keys import Keys
from outrider.store.redis import redis_clock as module
from outrider.store.redis.redis_clock import RedisClock
from outrider.store.registry import keep_announced
from tests.store.test_registry import VERIFIER

SKEWS_S = (75.0, -75.0)


def skewed(skew_s: float) -> RedisClock:
    return RedisClock(lambda: time.time() + skew_s)


@pytest.mark.parametrize("skew_s", SKEWS_S)
async def test_a_machine_with_another_time_has_that_of_redis(client: Redis, skew_s: float) -> None:
    clock = skewed(skew_s)
    assert (clock.now(), clock.skew_s()) == (pytest.approx(time.time() + skew_s, abs=0.5), 0.0)
    await clock.read(client)
    seconds, micros = await client.time()
    assert clock.now() == pytest.approx(seconds + micros / 1e6, abs=0.2)
    assert clock.skew_s() == pytest.approx(skew_s, abs=0.2)


async def test_a_clock_change_shows_in_the_skew_and_not_in_the_time(client: Redis) -> None:
    ahead = [0.0]
    clock = RedisClock(lambda: time.time() + ahead[0])
    await clock.read(client)
    before = clock.now()
    ahead[0] = 3600.0
    assert clock.now() == pytest.approx(before, abs=0.2)
    assert clock.skew_s() == pytest.approx(3600.0, abs=0.2)


async def test_a_reply_that_came_late_does_not_change_the_time(client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = RedisClock()
    await clock.read(client)
    monkeypatch.setattr(module, "MAX_READ_S", -1.0)
    monkeypatch.setattr(client, "time", _an_hour_ago)
    await clock.read(client)
    assert abs(clock.skew_s()) < 0.2


async def _an_hour_ago() -> tuple[int, int]:
    return int(time.time()) - 3600, 0


@pytest.fixture
async def heartbeats(redis_url: str) -> AsyncIterator[RedisClock]:
    clock = skewed(75.0)
    announcing = asyncio.create_task(keep_announced(redis_url, lambda: VERIFIER, 0.02, clock=clock))
    yield clock
    announcing.cancel()
    await asyncio.gather(announcing, return_exceptions=True)


async def test_a_worker_reads_the_clock_with_its_heartbeat(heartbeats: RedisClock) -> None:
    async with asyncio.timeout(3):
        while not heartbeats.skew_s():
            await asyncio.sleep(0.01)
    assert heartbeats.skew_s() == pytest.approx(75.0, abs=0.2)


@pytest.mark.parametrize("maker_s", SKEWS_S)
@pytest.mark.parametrize("router_s", SKEWS_S)
async def test_an_api_key_is_valid_for_its_stated_time_despite_clock_skew(
    client: Redis, maker_s: float, router_s: float
) -> None:
    maker, clock = Keys(client, skewed(maker_s)), skewed(router_s)
    await clock.read(client)
    router = Keys(client, clock)
    secret, _ = await maker.add("acme", valid_s=30.0)
    brief, _ = await maker.add("acme", valid_s=0.3)
    assert [key.expired(maker.clock.now()) for key in await maker.listed()] == [False, False]
    assert (await router.find(secret)).tenant == (await router.find(brief)).tenant == "acme"
    await asyncio.sleep(0.4)
    assert (await router.find(secret)).tenant == "acme"
    with pytest.raises(Unauthenticated):
        await router.find(brief)
