"""Routers list their ticket keys, and a key is listed for a while after its router's last renewal."""

from __future__ import annotations

import asyncio
import time

import pytest
from redis.asyncio import Redis

from outrider.errors import Unavailable
from outrider.store.redis.client import connect
from outrider.store.redis.redis_clock import RedisClock
from outrider.store.tickets import KEY_LIFE_S, MAX_KEYS, RENEW_S, list_key, listed_keys
from outrider.wire.tickets import TICKET_S
from router.sessions.maintenance import keep_key_listed

KEYS = "outrider:{tickets}:keys"
ONE, TWO = b"1" * 32, b"2" * 32


def test_a_key_outlasts_every_ticket_that_it_signed() -> None:  # bites: the times are the code's
    assert KEY_LIFE_S > TICKET_S + 10 * RENEW_S


async def test_every_routers_key_stays_listed_for_its_life_after_the_last_renewal(client: Redis) -> None:
    await list_key(client, ONE, 1000.0)
    await list_key(client, TWO, 1060.0)
    assert await listed_keys(client, lambda: 1060.0) == {ONE: 1000 + KEY_LIFE_S, TWO: 1060 + KEY_LIFE_S}
    await list_key(client, ONE, 1060.0)
    assert await listed_keys(client, lambda: 1060.0) == {ONE: 1060 + KEY_LIFE_S, TWO: 1060 + KEY_LIFE_S}
    assert KEY_LIFE_S < await client.ttl(KEYS) <= 2 * KEY_LIFE_S
    await list_key(client, TWO, 1061.0 + 2 * KEY_LIFE_S)  # removes the key whose router is gone
    assert list(await listed_keys(client, time.time)) == [TWO]


async def test_a_router_whose_clock_is_ahead_cannot_list_a_key_for_ever(client: Redis) -> None:
    await client.zadd(KEYS, {ONE: 10**15})
    assert await listed_keys(client, lambda: 1000.0) == {ONE: 1000 + KEY_LIFE_S}


async def test_only_the_longest_valid_keys_are_read_up_to_a_bound(client: Redis) -> None:
    await client.zadd(KEYS, {number.to_bytes(32, "big"): number for number in range(MAX_KEYS + 2)})
    found = await listed_keys(client, time.time)
    assert len(found) == MAX_KEYS
    assert (1).to_bytes(32, "big") not in found


async def test_a_redis_that_is_away_is_unavailable() -> None:
    async with connect("unix:///nowhere/redis.sock") as client:
        for work in (listed_keys(client, time.time), list_key(client, ONE, 0.0), RedisClock().read(client)):
            with pytest.raises(Unavailable):
                await work


async def test_a_router_lists_its_key_again_after_redis_has_lost_everything(
    client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.sessions.maintenance.RENEW_S", 0.01)
    renewing = asyncio.create_task(keep_key_listed(client, ONE, RedisClock()))
    try:
        for _ in range(2):
            while ONE not in await listed_keys(client, time.time):
                await asyncio.sleep(0.01)
            await client.flushall()
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
