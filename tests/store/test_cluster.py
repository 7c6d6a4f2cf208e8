"""Sessions, registry, claims and tickets work on a real Redis Cluster of three nodes."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace

import pytest
import redis
from redis.asyncio import RedisCluster

from outrider.core.session.contract import Contract
from outrider.core.session.digest import EMPTY, extend
from outrider.errors import Conflict, Superseded, Unavailable
from outrider.store.redis.client import address_of, connect, ping
from outrider.store.registry import Registry, Worker
from outrider.store.session_events import SessionEvent, SessionEvents
from outrider.store.sessions import SessionLog, Sessions, SessionTurn
from outrider.store.tickets import list_key, listed_keys
from tests.store.cluster import redis_cluster

TOKENS = [5, 6, 7, 8, 1, 2]
TURN = SessionTurn(Contract(seed=1, max_tokens=9, logprobs=0), (), answer_position=4, deadline=None)


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as ports:
        yield ports


@pytest.fixture
async def client(ports: list[int]) -> AsyncIterator[RedisCluster]:
    client = connect(f"redis+cluster://127.0.0.1:{ports[0]}")
    assert isinstance(client, RedisCluster)
    await client.flushall(target_nodes=RedisCluster.PRIMARIES)
    yield client
    await client.aclose()


async def _live(client: RedisCluster, sessions: Sessions, session_id: str) -> SessionLog:
    """The whole life of a session, its loss by Redis included."""
    await sessions.create(session_id, "tenant", "target", b"digest")  # False where the first reply was lost
    owned = await sessions.begin(session_id, 0, "r1", TURN, 0, TOKENS[:4], extend(EMPTY, TOKENS[:4]))
    assert await owned.append(4, [1], extend(EMPTY, TOKENS[:5]), logprobs=b"a") == 5
    await owned.renew()
    await owned.release("so far")
    taken = await sessions.acquire(session_id, 1, "r2")
    with pytest.raises(Superseded):
        await owned.append(5, [2], 1)
    await taken.append(5, [2], extend(EMPTY, TOKENS), logprobs=b"b")
    record = await sessions.get(session_id)
    await client.delete(f"outrider:{{{session_id}}}:log", f"outrider:{{{session_id}}}:session")
    await taken.restore(record, TOKENS, b"ab")
    await taken.finish("stop", "all")
    assert await sessions.get(session_id) == replace(
        record, epoch=3, lease=0, resumable=0, finished="stop", usage="all"
    )
    return await sessions.read(session_id)


async def test_sessions_live_on_all_nodes(ports: list[int], client: RedisCluster) -> None:
    await ping(client)
    assert address_of(client) == f"127.0.0.1:{ports[0]}"
    sessions = Sessions(client, ttl_s=60, lease_s=5, resume_ttl_s=20)
    names = [f"s{index}" for index in range(24)]
    logs = await asyncio.gather(*(_live(client, sessions, name) for name in names))
    assert logs == [SessionLog(0, tuple(TOKENS), b"ab", "stop")] * len(names)
    keys = 0
    for port in ports:
        with redis.Redis(port=port) as node:
            held = len(node.keys("outrider:{s*"))
            assert held % 2 == 0  # record and log of a session are in one place
            assert held >= 4
            keys += held
    assert keys == 2 * len(names)
    for name in names:
        await sessions.close(name)
        assert (await sessions.get(name)).closed


async def test_abandoned_sessions_are_found_on_all_nodes(client: RedisCluster) -> None:
    sessions = Sessions(client, ttl_s=60, lease_s=0, resume_ttl_s=0)
    names = {f"s{number}" for number in range(20)}
    for name in names:
        await sessions.create(name, "tenant", "target", b"digest")
        await sessions.begin(name, 0, "r1", TURN, 0, TOKENS[:4], extend(EMPTY, TOKENS[:4]))
    await asyncio.sleep(0.01)
    assert {name async for name in sessions.ids()} == names
    due = await sessions.leases.due()
    assert {lease.session_id for lease in due} == names
    assert all([await sessions.abandon(lease) for lease in due])
    assert not await sessions.leases.due()


async def test_callers_beyond_the_connections_take_turns(client: RedisCluster) -> None:
    sessions = Sessions(client, ttl_s=60, lease_s=5, resume_ttl_s=20)
    created = await asyncio.gather(*(sessions.create(f"s{index}", "t", "m", b"") for index in range(500)))
    assert all(created)


async def test_scripts_are_loaded_again_on_nodes_that_lost_them(client: RedisCluster) -> None:
    sessions = Sessions(client, ttl_s=60, lease_s=5, resume_ttl_s=20)
    await sessions.create("s1", "tenant", "target", b"digest")
    await client.script_flush()
    owned = await sessions.begin("s1", 0, "r1", TURN, 0, TOKENS[:4], 1)
    with pytest.raises(Conflict):
        await owned.append(9, [1], 1)


async def test_writes_of_one_moment_reach_their_nodes(ports: list[int], client: RedisCluster) -> None:
    sessions = Sessions(client, ttl_s=60, lease_s=5, resume_ttl_s=20)
    names = [f"s{index}" for index in range(24)]
    for name in names:
        await sessions.create(name, "tenant", "target", b"digest")
    owned = [await sessions.begin(name, 0, "r1", TURN, 0, TOKENS[:4], 1) for name in names]
    await client.script_flush()  # and the nodes get them again
    for length in (5, 6):
        assert await asyncio.gather(*(one.append(length - 1, [length], 1) for one in owned)) == [length] * len(names)
    await sessions.acquire("s3", 1, "somebody else")
    results = await asyncio.gather(*(one.append(6, [7], 1) for one in owned), return_exceptions=True)
    assert isinstance(results.pop(3), Superseded)
    assert results == [7] * (len(names) - 1)


async def test_events_reach_all_nodes(client: RedisCluster) -> None:
    events = SessionEvents(client)
    async with aclosing(events.listen()) as listening:
        assert await anext(listening) is None
        for number in range(6):
            await events.publish(f"s{number}", "v1")
            assert await anext(listening) == SessionEvent(f"s{number}", "v1")


async def test_idempotency_keys_tickets_and_the_registry_work_on_a_cluster(client: RedisCluster) -> None:
    sessions = Sessions(client, ttl_s=60, lease_s=5, resume_ttl_s=20)
    for index in range(8):
        assert await sessions.claim("tenant", f"key {index}", b"request", f"s{index}") == f"s{index}"
        assert await sessions.claim("tenant", f"key {index}", b"request", "another") == f"s{index}"
    await list_key(client, b"k" * 32, time.time())
    assert list(await listed_keys(client, time.time)) == [b"k" * 32]
    registry = Registry(client)
    worker = Worker("v1", "verifier", "127.0.0.1:7071", "target", b"digest", 4096, 1024, 8, 2, 6_700_000)
    for name in ("v1", "v2", "v3"):
        await registry.announce(replace(worker, worker_id=name), ttl_s=5 if name != "v3" else 0.02)
    await asyncio.sleep(0.05)
    assert [known.worker_id for known in await registry.workers()] == ["v1", "v2"]
    await registry.withdraw(worker)
    assert [known.worker_id for known in await registry.workers("verifier")] == ["v2"]


async def test_a_cluster_that_misses_a_part_is_reported(ports: list[int], client: RedisCluster) -> None:
    sessions = Sessions(client, ttl_s=60, lease_s=5, resume_ttl_s=20)
    await sessions.create("s1", "tenant", "target", b"digest")
    with redis.Redis(port=ports[0]) as node:
        slot = client.keyslot("outrider:{s1}:session")
        nodes = [redis.Redis(port=port) for port in ports]
        for one in nodes:
            one.execute_command("CLUSTER", "DELSLOTS", slot)
        try:
            with pytest.raises(Unavailable, match=r"misses a part|cannot be used as a cluster"):
                await sessions.get("s1")
        finally:
            for one in nodes:
                one.close()
        assert node.ping()
