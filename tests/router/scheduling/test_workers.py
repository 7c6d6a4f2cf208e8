"""The workers as a router sees them, and how seldom it has to ask."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from outrider.core.session.prefix_keys import pack_keys, prefix_keys
from outrider.core.session.speculation_status import SpeculationReason
from outrider.errors import Unavailable
from outrider.store.redis.client import connect
from outrider.store.registry import Registry, Role, Worker
from router.scheduling.workers import WorkerPool
from tests.router.fakes import FakeDrafter, FakeVerifier, announced


class _Counted(Registry):
    asked = 0

    async def workers(self, role: Role | None = None) -> list[Worker]:
        self.asked += 1
        await asyncio.sleep(0.02)
        return await super().workers(role)


async def test_concurrent_sessions_share_one_look_at_the_registry(redis_url: str) -> None:
    client = connect(redis_url)
    registry = _Counted(client)
    worker_pool = WorkerPool(registry)
    async with announced(FakeVerifier([1]), registry, b"digest"), announced(FakeDrafter(), registry, b"digest"):
        found = await asyncio.gather(*(worker_pool.verifiers("target") for _ in range(20)))
        assert [len(verifiers) for verifiers in found] == [1] * 20
        assert registry.asked == 2  # calls that came during a look wait for one more look
        assert len(await worker_pool.drafters(b"digest")) == 1
        assert registry.asked == 2
    await worker_pool.channels.close()
    await client.aclose()


async def test_a_role_without_workers_counts_as_zero(redis_url: str) -> None:
    client = connect(redis_url)
    registry = Registry(client)
    worker_pool = WorkerPool(registry)
    assert worker_pool.counts() == {"verifier": 0, "drafter": 0}
    async with announced(FakeVerifier([1]), registry, b"digest"):
        await worker_pool.verifiers("target")
    assert worker_pool.counts() == {"verifier": 1, "drafter": 0}
    await worker_pool.channels.close()
    await client.aclose()


async def test_a_cancelled_registry_look_does_not_serve_other_calls(redis_url: str) -> None:
    client = connect(redis_url)
    registry = _Counted(client)
    worker_pool = WorkerPool(registry)
    async with announced(FakeVerifier([1]), registry, b"digest"):
        first = asyncio.create_task(worker_pool.verifiers("target"))
        second = asyncio.create_task(worker_pool.verifiers("target"))
        await asyncio.sleep(0.01)
        first.cancel()
        assert len(await second) == 1
    await worker_pool.channels.close()
    await client.aclose()


async def test_a_failed_registry_look_fails_all_waiting_calls_at_once() -> None:
    client = connect("redis://127.0.0.1:1")
    registry = _Counted(client)
    worker_pool = WorkerPool(registry)
    results = await asyncio.gather(*(worker_pool.verifiers("target") for _ in range(20)), return_exceptions=True)
    assert all(isinstance(error, Unavailable) for error in results)
    assert registry.asked == 2
    await client.aclose()


async def test_a_worker_at_the_address_of_a_dead_one_is_not_avoided(redis_url: str) -> None:
    def worker(name: str) -> Worker:
        return Worker(name, "verifier", "127.0.0.1:1", "m", b"digest", 9, 9, 8, 0, 1)

    client = connect(redis_url)
    registry = Registry(client)
    worker_pool = WorkerPool(registry)
    await registry.announce(worker("before"), ttl_s=30.0)
    (before,) = await worker_pool.verifiers("m")
    worker_pool.add_session(before)
    channel = worker_pool.channels.to(before)
    worker_pool.on_failure(before, Unavailable("it died"))
    await registry.announce(worker("after"), ttl_s=30.0)
    first, last = await worker_pool.verifiers("m")
    assert (first.worker_id, worker_pool.suspected(first), worker_pool.sessions(first)) == ("after", False, 0)
    assert (last.worker_id, worker_pool.suspected(last), worker_pool.sessions(last)) == ("before", True, 1)
    assert worker_pool.channels.to(first) is not channel  # the old channel would pause before it connects again
    assert worker_pool.is_listed("after")
    kept, channel = (worker_pool.channels.to(worker) for worker in (first, last))
    await registry.withdraw(last)
    worker_pool.remove_session(last)
    assert [it.worker_id for it in await worker_pool.verifiers("m")] == ["after"]
    assert worker_pool.channels.to(first) is kept
    assert worker_pool.channels.to(last) is not channel
    await worker_pool.channels.close()
    await client.aclose()


async def test_a_drafter_that_was_trained_for_another_model_drafts_for_its_own_alone(
    caplog: pytest.LogCaptureFixture, redis_url: str
) -> None:
    def worker(name: str, role: Role, **more: str) -> Worker:
        return Worker(name, role, f"{name}:1", "m", b"digest", 9, 9, 8, 0, 1, **more)  # type: ignore[arg-type]

    client = connect(redis_url)
    registry = Registry(client)
    mine, other, unknown = (
        worker("v1", "verifier", weights="aa"),
        worker("v2", "verifier", weights="bb"),
        worker("v3", "verifier"),
    )
    for it in (mine, other, unknown, worker("d1", "drafter", trained_for="aa"), worker("d2", "drafter")):
        await registry.announce(it, ttl_s=30.0)
    worker_pool = WorkerPool(registry)
    for verifier, expected in ((mine, {"d1", "d2"}), (other, {"d2"}), (unknown, {"d1", "d2"})):
        for _ in range(2):
            assert {it.worker_id for it in await worker_pool.drafters(b"digest", verifier)} == expected
    assert [record.getMessage() for record in caplog.records if "trained for" in record.getMessage()] == [
        "drafter d1:1 is not used: the drafters were trained for another target (drafter d1:1 is m, trained for "
        "another model than m at v2:1); train one for this target, or start the drafter with --any-target"
    ]
    await worker_pool.channels.close()
    await client.aclose()


async def test_rules_that_draw_from_q_have_the_drafters_that_the_verifier_trusts(redis_url: str) -> None:
    def worker(name: str, role: Role, **more: str) -> Worker:
        return Worker(name, role, f"{name}:1", "m", b"digest", 9, 9, 8, 0, 1, **more)  # type: ignore[arg-type]

    async with aclosing(connect(redis_url)) as client:
        worker_pool = WorkerPool(Registry(client))
        for name in ("drafter-00c0ffee", "edge-1-00c0ffee", "edge-00c0ffee"):
            await Registry(client).announce(worker(name, "drafter"), ttl_s=30.0)
        for trusts, wanted in (
            ("*", ["drafter-00c0ffee", "edge-00c0ffee", "edge-1-00c0ffee"]),
            ("drafter", ["drafter-00c0ffee"]),
            ("edge-1 other", ["edge-1-00c0ffee"]),
            ("other", []),
        ):
            verifier = worker("v", "verifier", trusts=trusts)
            found = await worker_pool.drafters(b"digest", verifier, sampled=True)
            assert [drafter.worker_id for drafter in found] == wanted
            assert len(await worker_pool.drafters(b"digest", verifier)) == 3
        why = worker_pool.why_no_drafter(verifier, sampled=True)
        assert why.reason is SpeculationReason.RULE
        assert "drafter-00c0ffee is not among the trusted_drafters of m at v:1" in why.explanation
        await worker_pool.channels.close()


async def test_drafters_that_fit_nowhere_are_forgotten_with_the_workers(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(redis_url)
    registry = Registry(client)
    worker_pool = WorkerPool(registry)
    verifier = Worker("v", "verifier", "v:1", "m", b"digest", 9, 9, 8, 0, 1, weights="aa")
    await registry.announce(verifier, ttl_s=30.0)
    for number in [*range(20), 0]:
        drafter = Worker(f"d{number}", "drafter", f"d{number}:1", "m", b"digest", 9, 9, 8, 0, 1, trained_for="bb")
        await registry.announce(drafter, ttl_s=30.0)
        await worker_pool.refresh()
        assert await worker_pool.drafters(b"digest", verifier) == []
        ((found, why),) = worker_pool.misfits("m")
        assert (found.worker_id, "trained for another model" in why) == (drafter.worker_id, True)
        await registry.withdraw(drafter)
    await worker_pool.refresh()
    assert worker_pool.misfits("m") == []
    assert sum("drafter d0:1 is not used" in message for message in caplog.messages) == 2  # it was a new one again
    await worker_pool.channels.close()
    await client.aclose()


async def test_drafters_in_the_verifiers_zone_rank_first_and_recently_failed_ones_last(redis_url: str) -> None:
    def worker(name: str, role: Role, zone: str, sessions: int = 0) -> Worker:
        return Worker(name, role, f"{name}:1", "m", b"digest", 9, 9, 8, sessions, 1, zone=zone)

    client = connect(redis_url)
    registry = Registry(client)
    verifier = worker("v", "verifier", "a")
    for drafter in (
        worker("far", "drafter", "b"),
        worker("near", "drafter", "a", sessions=2),
        worker("nearer", "drafter", "a", sessions=1),
        worker("anywhere", "drafter", "", sessions=3),
    ):
        await registry.announce(drafter, ttl_s=30.0)
    worker_pool = WorkerPool(registry, zone="b")

    async def order(verifier: Worker) -> list[str]:
        return [drafter.worker_id for drafter in await worker_pool.drafters(b"digest", verifier)]

    assert await order(verifier) == ["nearer", "near", "anywhere", "far"]  # our own zone is of no matter
    assert await order(worker("w", "verifier", "")) == ["far", "nearer", "near", "anywhere"]  # by load alone
    (suspect,) = [drafter for drafter in await worker_pool.drafters(b"digest") if drafter.worker_id == "nearer"]
    worker_pool.suspect(suspect)
    assert await order(verifier) == ["near", "anywhere", "far", "nearer"]
    await worker_pool.channels.close()
    await client.aclose()


async def test_a_text_goes_to_the_verifier_that_read_its_prefix_for_the_same_tenant(redis_url: str) -> None:
    text = [*range(300)]

    def verifier(name: str, sessions: int, prefixes: str) -> Worker:
        return Worker(name, "verifier", f"{name}:1", "m", b"digest", 9, 9, 16, sessions, 1, prefixes=prefixes)

    client = connect(redis_url)
    registry = Registry(client)
    for worker in (verifier("a", 0, "malformed"), verifier("b", 1, pack_keys(prefix_keys(text[:260], "mine")))):
        await registry.announce(worker, ttl_s=30.0)
    worker_pool = WorkerPool(registry)
    workers = await worker_pool.verifiers("m")

    def order(tokens: list[int], tenant: str, holder: str = "") -> str:
        return "".join(worker.worker_id for worker in worker_pool.rank_verifiers(workers, holder, tokens, tenant))

    assert order(text, "mine") == "ba"
    assert order(text, "another's") == "ab"
    assert order(text[1:], "mine") == "ab"
    assert order(text, "mine", holder="a") == "ab"
    await worker_pool.channels.close()
    await client.aclose()
