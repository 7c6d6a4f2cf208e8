"""All that each role does in Redis, once: for tests of the users that the roles have there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import redis

from outrider.core.control.depth.goodput import AcceptancePriors
from outrider.core.session.contract import Adapter, Contract
from outrider.core.session.digest import EMPTY, extend
from outrider.core.session.training_samples import sample_of
from outrider.store.acceptance_priors import share
from outrider.store.adapters import ALL, NamedAdapter, NamedAdapters
from outrider.store.api_keys import Keys, TextReaders
from outrider.store.redis.acl import AclRole
from outrider.store.redis.client import Client, connect, ping
from outrider.store.redis.redis_clock import RedisClock
from outrider.store.registry import Registry, Worker
from outrider.store.session_events import SessionEvent, SessionEvents
from outrider.store.sessions import Sessions, SessionTurn
from outrider.store.tenant_storage import TenantStorage
from outrider.store.tickets import list_key, listed_keys
from outrider.store.training_samples import TrainingSampleStore
from outrider.store.versions import Version, Versions
from tests.store.test_acceptance_priors import learn

VERIFIER = Worker("v1", "verifier", "127.0.0.1:7071", "target", b"digest", 4096, 1024, 8, 2, 6_700_000)
DRAFTER = replace(VERIFIER, worker_id="d1", role="drafter")
TURN = SessionTurn(Contract(seed=1, max_tokens=9), (), 4, None)
PROMPT = [5, 6, 7, 8]
ADAPTER = NamedAdapter("sql", "target", Adapter("sql-2", "d0" * 16), 8, 1000)
VERSION = Version(1, "/versions/00001", "ab", "target", "cd", "ef")


async def router(client: Client, admin: Client) -> None:
    await ping(client)
    await list_key(client, b"k" * 32, time.time())
    await _expired(admin)
    await Registry(client).workers()
    gated = replace(DRAFTER, worker_id="gated-1", gate="router-1")
    await Registry(client).announce(gated, ttl_s=5)
    await Registry(client).withdraw(gated)
    await Keys(client).find((await Keys(admin).add("acme"))[0])
    assert await TextReaders(client).of("acme") == "cluster"
    adapters = NamedAdapters(client)
    for owner in ("", "acme", ALL):
        await adapters.add(owner, ADAPTER)
        assert await adapters.find(owner, "sql") == ADAPTER
        assert await adapters.listed(owner) == [ADAPTER]
        assert await adapters.remove(owner, "sql")
    for _ in range(2):
        learn(priors := AcceptancePriors(), 3)
        await share(client, "target:drafter:hot", priors)
    sample = sample_of([1, 2], np.array([[2, 7]]), np.array([[-0.1, -3.0]], np.float32))
    await TrainingSampleStore(client, "target", b"\0").add([sample])
    async with aclosing(SessionEvents(client).listen()) as events:
        assert await anext(events) is None
        await SessionEvents(client).publish("s1", "v1")
        assert await anext(events) == SessionEvent("s1", "v1")
    await _sessions(client, admin)


async def _sessions(client: Client, admin: Client) -> None:
    sessions = Sessions(client, ttl_s=60, lease_s=5, resume_ttl_s=20)
    for name in ("s1", "s2"):
        await sessions.create(name, "tenant", "target", b"digest")
        await sessions.claim("tenant", f"key of {name}", b"request", name)
        await sessions.claimed("tenant", f"key of {name}", b"request")
    digest = extend(EMPTY, PROMPT)
    begun = await sessions.begin("s1", 0, "r1", TURN, 0, PROMPT, digest)
    other = await sessions.begin("s2", 0, "r1", TURN, 0, PROMPT, digest)
    digest = extend(digest, [9])
    await begun.append(4, [9], digest, logprobs=b"abcd")
    await begun.append(4, [9], digest, logprobs=b"abcd")  # a retry is compared with the log
    await asyncio.gather(begun.renew(), other.renew(), begun.renew(), other.renew())  # as one group
    await begun.release("usage")
    taken = await sessions.acquire("s1", 1, "r2")
    record = await sessions.get("s1", "tenant")
    await sessions.read("s1", 3)
    await admin.delete("outrider:{s1}:session", "outrider:{s1}:log")  # what Redis lost comes back
    await taken.restore(replace(record, digest=digest, length=5), [*PROMPT, 9], b"abcd")
    await taken.restore(replace(record, digest=digest, length=5), [*PROMPT, 9], b"abcd")
    await taken.finish("stop", "usage")
    await sessions.leases.remove_ended()
    assert sorted([name async for name in sessions.ids()]) == ["s1", "s2"]
    brief = Sessions(client, ttl_s=60, lease_s=0, resume_ttl_s=0)
    await brief.create("s3", "tenant", "target", b"digest")
    await brief.begin("s3", 0, "r1", TURN, 0, PROMPT, extend(EMPTY, PROMPT))
    await asyncio.sleep(0.002)
    for lease in await brief.leases.due():
        await brief.left_behind(lease)
        await brief.abandon(lease)
    await sessions.list_lease("s2")
    await sessions.runs("s2")
    await sessions.leases.begin_scan()
    await sessions.leases.end_scan()
    for name in ("s1", "s2", "s3"):
        await sessions.close(name)
    storage = TenantStorage(client, 0.002, sessions=9, size=9_999)
    await storage.measure()
    await storage.reserve("tenant", "s1", 1, 100, new=True, claim="key")
    await asyncio.sleep(0.004)
    await storage.reserve("tenant", "s2", 1, 100, new=True)
    await storage.forget("tenant", "s2")


async def verifier(client: Client, admin: Client) -> None:
    await ping(client)
    await listed_keys(client, time.time)
    await RedisClock().read(client)
    await Registry(client).announce(VERIFIER, ttl_s=5)
    await Registry(client).withdraw(VERIFIER)


async def drafter(client: Client, admin: Client) -> None:
    await ping(client)
    await listed_keys(client, time.time)
    await RedisClock().read(client)
    await Registry(client).announce(DRAFTER, ttl_s=5)
    await Registry(client).withdraw(DRAFTER)
    versions = Versions(client, "drafter")
    await versions.read()
    await versions.doubt(1, "seems worse")
    await versions.withdraw(1, "worse")


async def trainer(client: Client, admin: Client) -> None:
    await ping(client)
    await _expired(admin)
    await Registry(client).workers()
    samples = TrainingSampleStore(client, "target", b"\0")
    await samples.after("0")
    await samples.end()
    versions = Versions(client, "drafter")
    await versions.publish(VERSION)
    await versions.read()
    await versions.clear(1, "it is the traffic")
    await versions.forget(1)


async def keys(client: Client, admin: Client) -> None:
    store = Keys(client)
    secret, key = await store.add("acme")
    assert await store.find(secret) == key
    assert key in await store.listed()
    await store.revoke(key.key_id)
    await TextReaders(client).set("other", "any")


WORK: dict[AclRole, Callable[[Client, Client], Awaitable[None]]] = {
    "router": router,
    "verifier": verifier,
    "drafter": drafter,
    "trainer": trainer,
    "keys": keys,
}


async def _expired(admin: Client) -> None:
    """Workers of both roles whose entries have expired, for a reader to remove."""
    for listed in ("ids", "drafter-ids"):
        await admin.sadd(f"outrider:{{workers}}:{listed}", "gone")


async def works(role: AclRole, url: str, admin_url: str) -> None:
    """Do all that a role does as the user of `url`."""
    async with connect(url) as client, connect(admin_url) as admin:
        await WORK[role](client, admin)


def denied(client: redis.Redis) -> list[str]:
    """What the server has denied to its users so far, as its ACL log has it."""
    return [f"{entry['username']}: {entry['reason']} {entry['object']}" for entry in client.acl_log()]
