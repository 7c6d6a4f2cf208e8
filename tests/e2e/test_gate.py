"""Drafters that dial a router: they need no port, no Redis, and no way to a verifier but the router."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from outrider.client import AsyncClient, SpeculationReason
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.fleet.cluster import LocalCluster
from outrider.fleet.process import Process
from tests.e2e.conftest import MODELS

pytestmark = pytest.mark.asyncio(loop_scope="session")

TERMS: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True, "seed": 3, "temperature": 0.7}


@asynccontextmanager
async def cluster(**routing: Any) -> AsyncIterator[LocalCluster]:
    config = ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": MODELS / "target"}, **routing),
        verifier=[VerifierConfig(model=MODELS / "target", dtype="float32", slots=4)],
    )
    async with LocalCluster(config, forward=lambda name, line: print(name, line)) as running:
        yield running


@asynccontextmanager
async def dialed(router: str, **changes: Any) -> AsyncIterator[Process]:
    """A drafter that has dialed a router."""
    config = DrafterConfig(model=MODELS / "drafter", dtype="float32", slots=4, connect=router, **changes)
    drafter = Process("drafter", "laptop", config, lambda name, line: print(name, line))
    try:
        await drafter.start("")
        yield drafter
    finally:
        await drafter.stop()


async def drafted(client: AsyncClient, prompt: str, attempts: int = 10) -> int:
    """Accepted drafts of a text that is the plain one, of as many attempts as it takes."""
    plain = await client.generate(prompt, speculation="off", **TERMS)
    for _ in range(attempts):
        fast = await client.generate(prompt, speculation="rounds", **TERMS)
        assert fast.token_ids == plain.token_ids
        if fast.usage.accepted:
            return fast.usage.accepted
    return 0


async def test_a_drafter_that_dials_drafts_through_the_router(prompts: list[str]) -> None:
    async with cluster() as running, AsyncClient(running.router_address) as client:
        assert not await drafted(client, prompts[0], attempts=1)
        async with dialed(running.router_address):
            assert await drafted(client, prompts[0])
            assert [model.drafters for model in await client.models()] == [1]
        for _ in range(50):  # it has gone
            if [model.drafters for model in await client.models()] == [0]:
                break
            await asyncio.sleep(0.1)
        after = await client.generate(prompts[0], speculation="rounds", **TERMS)
        assert after.usage.accepted == 0
        assert after.usage.speculation.reason is SpeculationReason.NO_DRAFTER


async def test_a_drafter_that_is_killed_disturbs_no_answer_and_another_takes_its_place(prompts: list[str]) -> None:
    async with cluster() as running, AsyncClient(running.router_address) as client:
        plain = await client.generate(prompts[0], speculation="off", **TERMS | {"max_tokens": 300})
        async with dialed(running.router_address) as first:
            assert await drafted(client, prompts[1])
            stream = client.stream(prompts[0], speculation="rounds", **TERMS | {"max_tokens": 300})
            chunks = 0
            async for _ in stream:
                chunks += 1
                if chunks == 5:
                    os.kill(first.pid, signal.SIGKILL)
            assert stream.result.token_ids == plain.token_ids
        async with dialed(running.router_address):
            assert await drafted(client, prompts[2])


async def test_a_drafter_dials_again_when_its_router_is_back(prompts: list[str]) -> None:
    async with cluster() as running:
        router = running.processes["router"]
        async with dialed(router.address):
            async with AsyncClient(router.address) as client:
                assert await drafted(client, prompts[0])
            os.kill(router.pid, signal.SIGKILL)
            await router.wait()
            router.section = router.section.model_copy(update={"listen": router.address})
            await router.start(running.redis_url)
            async with AsyncClient(router.address) as client:
                assert await drafted(client, prompts[1])
