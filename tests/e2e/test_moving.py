"""Drafters come and go while sessions run, and sessions move to where there is room."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence

import pytest

import outrider
from outrider.config import DrafterConfig, RouterConfig, VerifierConfig
from outrider.fleet.process import Process
from outrider.rpc.channels import open_channel
from outrider.store.redis.embedded import EmbeddedRedis
from outrider.v1 import types_pb2
from outrider.v1.drafter_pb2_grpc import DrafterStub
from tests.e2e.conftest import MODELS

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

SESSIONS = 12  # each draws whether it moves: that fewer than two do is seen once in 300 runs, and they draw again
TOKENS = 900


async def sessions_of(drafters: Sequence[Process]) -> list[int]:
    counts = []
    for drafter in drafters:
        async with open_channel(drafter.address) as channel:
            counts.append((await DrafterStub(channel).Describe(types_pb2.DescribeRequest())).sessions)
    return counts


async def test_half_of_the_sessions_move_to_a_later_drafter(prompts: list[str]) -> None:
    drafting = DrafterConfig(model=MODELS / "target", drafts="suffix", slots=16)
    with EmbeddedRedis() as redis:
        verifying = VerifierConfig(model=MODELS / "target", dtype="float32", numerics="invariant", slots=16)
        verifier = Process("verifier", "verifier", verifying, print)
        routing = RouterConfig(listen="127.0.0.1:0", models={"target": MODELS / "target"}, overlap=True)
        router = Process("router", "router", routing, print)
        drafters = [Process("drafter", f"drafter-{number}", drafting, print) for number in range(2)]
        try:
            await asyncio.gather(*(each.start(redis.url) for each in (verifier, router, drafters[0])))
            async with outrider.AsyncClient(router.address) as client:

                async def generate(number: int, speculation: str) -> tuple[int, ...]:
                    terms = {"seed": number, "max_tokens": TOKENS, "ignore_eos": True, "timeout": 100}
                    result = await client.generate(prompts[number % len(prompts)], speculation=speculation, **terms)
                    return result.token_ids

                alone = await asyncio.gather(*(generate(number, "off") for number in range(SESSIONS)))
                await drafters[1].start(redis.url)
                pid = drafters[1].pid
                os.kill(pid, signal.SIGSTOP)  # it comes back when sessions run, sooner than one could be started
                while (await client.models())[0].drafters > 1:
                    await asyncio.sleep(0.1)
                generating = [asyncio.create_task(generate(number, "fixed")) for number in range(SESSIONS)]
                while (await sessions_of(drafters[:1]))[0] < SESSIONS:
                    await asyncio.sleep(0.05)
                os.kill(pid, signal.SIGCONT)
                counts = [0, 0]
                while min(counts) < 2 and not any(task.done() for task in generating):
                    counts = await sessions_of(drafters)
                    await asyncio.sleep(0.1)
                print(f"sessions of each: {counts}")
                assert min(counts) >= 2
                assert await asyncio.gather(*generating) == alone
        finally:
            await asyncio.gather(*(each.stop() for each in (router, verifier, *drafters) if each.address))
