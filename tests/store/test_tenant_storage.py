"""What tenants keep in Redis: counted by generation, bounded, and forgotten with what expires."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from outrider.core.session.contract import Contract, Grammar
from outrider.errors import Overloaded
from outrider.store import tenant_storage
from outrider.store.records import SessionTurn, dump_turn
from outrider.store.redis.client import connect
from outrider.store.tenant_storage import CLAIM_BYTES, TenantStorage, generation_bytes

Made = Callable[..., TenantStorage]


@pytest_asyncio.fixture
async def made(redis_url: str) -> AsyncIterator[Made]:
    client = connect(redis_url)
    yield lambda ttl_s=60.0, sessions=None, size=None: TenantStorage(client, ttl_s, sessions=sessions, size=size)
    await client.aclose()


async def taken(storage: TenantStorage, tenant: str = "a") -> int:
    """What is counted for a tenant; counting nothing changes nothing."""
    _, count = await storage._run(tenant, "probe", 0, "", "", "", "")
    return count


def turn_of(stops: tuple[str, ...] = (), **terms: Any) -> SessionTurn:
    return SessionTurn(Contract(seed=0, max_tokens=100, **terms), stops, 10, None)


def test_the_bytes_of_a_generation_grow_with_its_limits() -> None:
    plain, logged = turn_of(), turn_of(logprobs=20)
    assert generation_bytes(1000, plain) > generation_bytes(10, plain) > generation_bytes(10, plain, 3)
    assert generation_bytes(10, logged) - generation_bytes(10, plain) >= 100 * 160


@pytest.mark.parametrize(
    "turn",
    [
        turn_of(),
        turn_of(stops=("é" * 256,) * 16),
        turn_of(logit_bias=tuple((index, 1.2345678901234) for index in range(4096))),
        turn_of(allowed_ids=tuple(range(4096))),
        turn_of(banned_ids=tuple(range(4096)), stop_ids=tuple(range(64))),
        turn_of(grammar=Grammar("regex", "é" * 9_999)),
    ],
    ids=["plain", "stops", "bias", "allowed", "banned", "grammar"],
)
def test_every_unbounded_field_of_a_turn_counts_at_its_stored_size(turn: SessionTurn) -> None:
    assert generation_bytes(0, turn, 0) >= len(dump_turn(turn))


async def test_an_idempotency_key_counts_while_it_is_held_also_when_its_session_is_closed(made: Made) -> None:
    storage = made(size=10_000, ttl_s=0.3)
    for number in range(10):
        await storage.reserve("a", f"s{number}", 1, 500, new=True, claim=f"key {number}")
        await storage.reserve("a", f"s{number}", 1, 500, new=True, claim=f"key {number}")  # a repetition
        await storage.forget("a", f"s{number}")
    assert await taken(storage) == 10 * CLAIM_BYTES
    with pytest.raises(Overloaded, match="tenant_stored_bytes"):
        await storage.reserve("a", "t", 1, 9_900 - 10 * CLAIM_BYTES, new=True, claim="one more")
    assert await taken(storage) == 10 * CLAIM_BYTES
    await storage.reserve("a", "t", 2, 100, new=True, claim="one more")
    await storage.reserve("a", "t", 1, 100, new=False, claim="of a turn that is late")
    assert await taken(storage) == 100 + 12 * CLAIM_BYTES
    await asyncio.sleep(0.35)
    assert await taken(storage) == 0


async def test_a_generation_is_counted_before_it_begins_and_corrected_when_it_has_ended(made: Made) -> None:
    storage = made(size=10_000)
    await storage.reserve("a", "s", 1, 8_000, new=True)
    await storage.reserve("a", "s", 1, 8_000, new=True)  # a repetition
    assert await taken(storage) == 8_000
    with pytest.raises(Overloaded, match=r"sessions take 8000 bytes of at most 10000 \(tenant_stored_bytes\)"):
        await storage.reserve("a", "t", 1, 2_001, new=True)
    await storage.reserve("b", "t", 1, 9_000, new=True)  # another tenant
    await storage.settle("a", "s", 1, 500)
    assert await taken(storage) == 500
    await storage.reserve("a", "s", 2, 3_000, new=False)
    await storage.settle("a", "s", 2, 1_000)
    await storage.settle("a", "s", 1, 500)  # late
    assert await taken(storage) == 1_500
    await storage.reserve("a", "t", 1, 8_500, new=True)
    await storage.forget("a", "s")
    assert await taken(storage) == 8_500
    assert await taken(storage, "b") == 9_000


async def test_a_tenants_sessions_are_bounded(made: Made) -> None:
    storage = made(sessions=2)
    for name in ("s", "t"):
        await storage.reserve("a", name, 0, 10, new=True)
    with pytest.raises(Overloaded, match=r"has 2 sessions \(tenant_stored_sessions\)"):
        await storage.reserve("a", "u", 0, 10, new=True)
    await storage.reserve("a", "t", 1, 10, new=False)  # one that is there goes on
    await storage.forget("a", "t")
    await storage.reserve("a", "u", 1, 10, new=True)


async def test_expired_bytes_are_not_counted(made: Made) -> None:
    storage = made(ttl_s=0.2, sessions=1, size=100)
    await storage.reserve("a", "s", 1, 100, new=True)
    with pytest.raises(Overloaded):
        await storage.reserve("a", "t", 1, 1, new=True)
    await asyncio.sleep(0.3)
    await storage.reserve("a", "t", 1, 90, new=True)
    assert await taken(storage) == 90
    lasting = made(ttl_s=1.0, size=100)
    await lasting.reserve("b", "s", 1, 60, new=True)
    await asyncio.sleep(0.6)
    await lasting.reserve("b", "t", 1, 40, new=True)
    await asyncio.sleep(0.6)
    await lasting.reserve("b", "u", 1, 60, new=True)  # the first one has expired, while the second was there
    assert await taken(lasting, "b") <= 100


async def test_concurrent_reservations_never_exceed_the_bound(made: Made) -> None:
    storage = made(size=1_000)
    outcomes = await asyncio.gather(
        *(storage.reserve("a", str(number), 1, 100, new=True) for number in range(30)), return_exceptions=True
    )
    assert sum(outcome is None for outcome in outcomes) == 10
    assert await taken(storage) == 1_000


async def test_a_redis_that_is_almost_full_takes_no_new_sessions(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = made()
    await storage.measure()
    assert not storage.bounded  # this Redis has no limit
    await storage.reserve("a", "s", 1, 10**12, new=True)
    memory = {"used_memory": 850, "maxmemory": 1000}

    async def info(*_: str) -> dict[str, int]:
        return memory

    monkeypatch.setattr(Redis, "info", info)
    await storage.measure()
    assert storage.bounded
    await storage.reserve("a", "s", 1, 400, new=True)
    with pytest.raises(Overloaded, match="at most 500"):
        await storage.reserve("a", "t", 1, 101, new=True)
    memory["used_memory"] = 901
    await storage.measure()
    with pytest.raises(Overloaded, match="Redis is almost full, so no session begins"):
        await storage.reserve("b", "t", 1, 1, new=True)
    await storage.reserve("a", "s", 2, 100, new=False)
    assert tenant_storage.FULL < 1
