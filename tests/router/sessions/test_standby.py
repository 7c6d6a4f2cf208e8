"""A second copy of a session's KV is asked for as soon as there is another verifier."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from outrider.core.session.contract import Adapter
from outrider.store.redis.client import connect
from outrider.store.registry import Registry
from router.background import BackgroundTasks
from router.scheduling.workers import WorkerPool
from router.sessions.standby import MIN_MISSING_TOKENS, Standby
from tests.router.fakes import FakeVerifier, announced
from tests.router.rig import MODEL, until


async def test_a_verifier_that_has_just_started_is_asked_with_the_next_commit(redis_url: str) -> None:
    client = connect(redis_url)
    registry = Registry(client)
    router: Any = SimpleNamespace(
        worker_pool=WorkerPool(registry), background=BackgroundTasks()
    )  # all that a standby has of it
    standby = Standby(router, MODEL, "tenant", Adapter("sql", "0d" * 16))
    tokens = [1] * (MIN_MISSING_TOKENS + 1)
    fresh = FakeVerifier([1])
    async with announced(FakeVerifier([1]), registry, MODEL.digest):
        (serving,) = await router.worker_pool.verifiers(MODEL.name)
        standby.follow(tokens, serving)
        await router.background.drain(1.0)
        assert not standby.holder
        async with announced(fresh, registry, MODEL.digest):
            await router.worker_pool.refresh()
            standby.follow(tokens, serving)
            await until(lambda: bool(standby.holder), within_s=0.5)
            assert fresh.warmed == [("tenant", len(tokens))]
            assert fresh.adapters == ["sql"]
            standby.follow(tokens, serving)  # it has all of it
            await router.background.drain(1.0)
            assert fresh.warmed == [("tenant", len(tokens))]
    await router.worker_pool.channels.close()
    await client.aclose()


async def test_a_standby_reads_tokens_that_are_committed_while_it_reads(redis_url: str) -> None:
    client = connect(redis_url)
    registry = Registry(client)
    router: Any = SimpleNamespace(worker_pool=WorkerPool(registry), background=BackgroundTasks())
    standby = Standby(router, MODEL, "tenant")
    tokens = [1] * MIN_MISSING_TOKENS
    other = FakeVerifier([1])
    other.reading = lambda: tokens.extend(
        [1] * (MIN_MISSING_TOKENS if len(tokens) < 3 * MIN_MISSING_TOKENS else MIN_MISSING_TOKENS - 1)
    )
    async with announced(FakeVerifier([1]), registry, MODEL.digest):
        (serving,) = await router.worker_pool.verifiers(MODEL.name)
        async with announced(other, registry, MODEL.digest):
            await router.worker_pool.refresh()
            standby.follow(tokens, serving)
            await until(lambda: len(other.warmed) == 3)
            await router.background.drain(1.0)
            assert [count for _, count in other.warmed] == [
                MIN_MISSING_TOKENS,
                2 * MIN_MISSING_TOKENS,
                3 * MIN_MISSING_TOKENS,
            ]  # less than that is missing
    await router.worker_pool.channels.close()
    await client.aclose()
