"""Workers are listed while they announce themselves, and not a TTL longer."""

import asyncio
import json
import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from outrider.core.session.protocol import PROTOCOL
from outrider.errors import Unavailable
from outrider.store.redis.client import connect
from outrider.store.redis.embedded import EmbeddedRedis
from outrider.store.registry import Registry, Worker, keep_announced
from tests.store.server import Server

VERIFIER = Worker(
    worker_id="v1",
    role="verifier",
    address="127.0.0.1:7071",
    model="target",
    tokenizer_digest=bytes(range(16)),
    vocabulary=4096,
    context=1024,
    slots=8,
    sessions=2,
    parameters=6_700_000,
)
DRAFTER = replace(VERIFIER, worker_id="d1", role="drafter", model="drafter")


@pytest.fixture
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder), appendonly="no") as server:
        yield server


async def test_workers_are_listed_by_role_with_their_latest_description(client: Redis) -> None:
    registry = Registry(client)
    await registry.announce(VERIFIER, ttl_s=5)
    await registry.announce(DRAFTER, ttl_s=5)
    await registry.announce(replace(VERIFIER, sessions=3), ttl_s=5)
    assert await registry.workers("verifier") == [replace(VERIFIER, sessions=3)]
    assert await registry.workers("drafter") == [DRAFTER]
    await registry.withdraw(VERIFIER)
    await registry.withdraw(VERIFIER)
    assert await registry.workers("verifier") == []


async def test_a_worker_that_stopped_announcing_expires(client: Redis) -> None:
    registry = Registry(client)
    await registry.announce(VERIFIER, ttl_s=0.05)
    await asyncio.sleep(0.1)
    assert await registry.workers("verifier") == []
    assert await client.keys("*") == []


async def test_a_foreign_entry_is_skipped_and_logged(client: Redis, caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry(client)
    await registry.announce(VERIFIER, ttl_s=5)
    for name, value in (("x1", "not json"), ("x2", "{}"), ("x3", "[]")):
        await client.set(f"outrider:{{workers}}:id:{name}", value)
        await client.sadd("outrider:{workers}:ids", name)
    assert await registry.workers("verifier") == [VERIFIER]
    assert len(caplog.records) == 3


async def test_an_entry_without_a_protocol_is_of_an_older_version(client: Redis) -> None:
    registry = Registry(client)
    await registry.announce(VERIFIER, ttl_s=5)
    (worker,) = await registry.workers()
    assert worker.protocol == PROTOCOL
    entry = json.loads(await client.get("outrider:{workers}:id:v1"))
    del entry["protocol"]
    await client.set("outrider:{workers}:id:v1", json.dumps(entry))
    (worker,) = await registry.workers()
    assert worker.protocol == 0


async def test_a_drafter_cannot_pose_as_a_verifier_or_replace_one(
    client: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry(client)
    await registry.announce(VERIFIER, ttl_s=5)
    await registry.announce(replace(DRAFTER, worker_id="v1"), ttl_s=5)
    posing = await client.get("outrider:{workers}:id:v1")
    await client.set("outrider:{workers}:drafter-id:v2", posing)
    await client.sadd("outrider:{workers}:drafter-ids", "v2")
    assert await registry.workers() == [VERIFIER]
    assert "a verifier is listed among the drafters" in caplog.text


async def test_a_drafter_of_an_older_version_is_found_among_the_verifiers(client: Redis) -> None:
    registry = Registry(client)
    await registry.announce(DRAFTER, ttl_s=5)
    for kind in ("id", "ids"):
        old, new = (f"outrider:{{workers}}:{prefix}{kind}" + ":d1" * (kind == "id") for prefix in ("drafter-", ""))
        await client.rename(old, new)
    assert await registry.workers("drafter") == [DRAFTER]


async def test_keep_announced_follows_the_description_and_withdraws(client: Redis, redis_url: str) -> None:
    sessions = 0

    def describe() -> Worker:
        return replace(VERIFIER, sessions=sessions)

    registry = Registry(client)
    task = asyncio.create_task(keep_announced(redis_url, describe, 0.02))
    await _listed(registry)
    sessions = 7
    async with asyncio.timeout(10):
        while [worker.sessions for worker in await registry.workers("verifier")] != [7]:
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await registry.workers("verifier") == []


async def _listed(registry: Registry) -> None:
    for _ in range(500):
        if await registry.workers("verifier"):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not announced within 5 s")


async def test_an_announcement_has_the_cores_that_the_process_keeps_busy(client: Redis, redis_url: str) -> None:
    registry = Registry(client)
    task = asyncio.create_task(keep_announced(redis_url, lambda: VERIFIER, 0.02))
    await _listed(registry)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        sum(range(20_000))
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        while not (busy := (await registry.workers("verifier"))[0].cores):
            await asyncio.sleep(0.01)
    assert 0.05 < busy < 1.5
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_keep_announced_survives_an_outage_and_logs_it_once(caplog: pytest.LogCaptureFixture) -> None:
    with EmbeddedRedis() as server:
        client = connect(server.url)
        assert isinstance(client, Redis)
        task = asyncio.create_task(keep_announced(server.url, lambda: VERIFIER, 0.02))
        registry = Registry(client)
        await _listed(registry)
        await client.config_set("requirepass", "changed")  # the server refuses us now
        await client.client_kill_filter(_type="normal", skipme=True)

        def warnings() -> int:
            return sum(entry.levelno == logging.WARNING for entry in caplog.records)

        async with asyncio.timeout(10):
            while not warnings():
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert not task.done()
        assert warnings() == 1
        password = server.url.partition("password=")[2]
        await client.config_set("requirepass", password)
        await _listed(registry)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await client.aclose()


def _ids(workers: list[Worker]) -> list[str]:
    return [worker.worker_id for worker in workers]


async def test_after_an_outage_known_workers_count_as_alive_for_one_of_their_ttls(server: Server) -> None:
    client, ttl_s = connect(server.url), 0.4
    registry, fresh = Registry(client), Registry(client)
    await registry.announce(VERIFIER, ttl_s)
    await registry.announce(DRAFTER, 30)
    assert _ids(await registry.workers()) == ["d1", "v1"]
    server.kill()
    with pytest.raises(Unavailable):
        await registry.workers()
    await asyncio.sleep(ttl_s + 0.1)  # an outage takes as long as it takes
    server.start()  # and has forgotten everything
    assert _ids(await registry.workers()) == ["d1", "v1"]
    assert await registry.workers("verifier") == [VERIFIER]
    assert await fresh.workers() == []  # it never listed any before
    await registry.announce(replace(VERIFIER, sessions=7), 30)
    assert await registry.workers("verifier") == [replace(VERIFIER, sessions=7)]
    await registry.withdraw(VERIFIER)
    assert await registry.workers("verifier") == []  # it came back and went by itself
    assert _ids(await registry.workers()) == ["d1"]
    await client.aclose()


async def test_a_worker_that_does_not_return_within_a_ttl_is_dropped(server: Server) -> None:
    client, ttl_s = connect(server.url), 2.0
    registry = Registry(client)
    await registry.announce(VERIFIER, ttl_s)
    await registry.workers()
    server.kill()
    with pytest.raises(Unavailable):
        await registry.workers()
    server.start()
    assert await registry.workers() == [VERIFIER]
    await asyncio.sleep(0.1)
    assert await registry.workers() == [VERIFIER]
    async with asyncio.timeout(10):
        while await registry.workers():
            await asyncio.sleep(0.05)
    await client.aclose()


async def test_a_worker_missing_without_an_outage_is_dropped(client: Redis) -> None:
    registry = Registry(client)
    await registry.announce(VERIFIER, ttl_s=5)
    assert await registry.workers() == [VERIFIER]
    await client.flushall()
    assert await registry.workers() == []
