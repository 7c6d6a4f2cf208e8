"""Who keeps a second copy of a session's KV: asked as soon as there is somebody."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from outrider.store.client import connect
from outrider.store.registry import Registry
from router.background import Background
from router.fleet import Fleet
from router.standby import LEAST, Standby
from tests.router.fakes import FakeVerifier, announced
from tests.router.rig import MODEL, until


async def test_a_verifier_that_has_just_started_is_asked_with_the_next_commit(redis_url: str) -> None:
    client = connect(redis_url)
    registry = Registry(client)
    cluster: Any = SimpleNamespace(fleet=Fleet(registry), background=Background())  # all that a standby has of it
    standby = Standby(cluster, MODEL, "tenant")
    tokens = [1] * (LEAST + 1)
    fresh = FakeVerifier([1])
    async with announced(FakeVerifier([1]), registry, MODEL.digest):
        (serving,) = await cluster.fleet.verifiers(MODEL.name)
        standby.follow(tokens, serving)
        await cluster.background.drain(1.0)
        assert not standby.holder
        async with announced(fresh, registry, MODEL.digest):
            await cluster.fleet.refresh()
            standby.follow(tokens, serving)
            await until(lambda: bool(standby.holder), within_s=0.5)
            assert fresh.warmed == [("tenant", len(tokens))]
            standby.follow(tokens, serving)  # it has all of it
            await cluster.background.drain(1.0)
            assert fresh.warmed == [("tenant", len(tokens))]
    await cluster.fleet.close()
    await client.aclose()


async def test_what_is_said_while_it_reads_is_read_as_well_though_no_further_commit_comes(redis_url: str) -> None:
    client = connect(redis_url)
    registry = Registry(client)
    cluster: Any = SimpleNamespace(fleet=Fleet(registry), background=Background())
    standby = Standby(cluster, MODEL, "tenant")
    tokens = [1] * LEAST
    other = FakeVerifier([1])
    other.reading = lambda: tokens.extend([1] * (LEAST if len(tokens) < 3 * LEAST else LEAST - 1))
    async with announced(FakeVerifier([1]), registry, MODEL.digest):
        (serving,) = await cluster.fleet.verifiers(MODEL.name)
        async with announced(other, registry, MODEL.digest):
            await cluster.fleet.refresh()
            standby.follow(tokens, serving)
            await until(lambda: len(other.warmed) == 3)
            await cluster.background.drain(1.0)
            assert [count for _, count in other.warmed] == [LEAST, 2 * LEAST, 3 * LEAST]  # less than LEAST is missing
    await cluster.fleet.close()
    await client.aclose()
