"""A hundred drafters that dial in and out at random: no session is disturbed, and nothing of them is left behind."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import aclosing, suppress
from typing import Any

import grpc.aio
import pytest

from outrider.client import AsyncClient
from outrider.fleet.cluster import LocalCluster
from outrider.store.redis.client import connect
from outrider.store.registry import Registry
from outrider.wire import drafter as wire
from tests.e2e.laptop import dialed
from tests.e2e.protocol.test_15_gate import entry, stream
from tests.e2e.test_gate import TERMS, cluster, drafted

pytestmark = pytest.mark.asyncio(loop_scope="session")

CROWD = 100
DETACHED: dict[str, Any] = {"detached": wire.DetachResponse()}


async def come_and_go(running: LocalCluster, dice: random.Random, until: float) -> int:
    """Dials as one drafter after another; takes sessions, refuses them, or says nothing. Returns how often it was
    called."""
    called = 0
    while time.monotonic() < until:
        with suppress(grpc.aio.AioRpcError, asyncio.CancelledError, TimeoutError):
            async with stream(running) as call, asyncio.timeout(dice.uniform(0.1, 8.0)):
                said = entry(slots=dice.randrange(1, 50), sessions=0)
                talking = asyncio.create_task(_talk(call, said))
                try:
                    while (frame := await call.read()) is not grpc.aio.EOF:
                        down = wire.GateDown.FromString(frame)
                        is_call = down.WhichOneof("frame") == "call"
                        called += is_call
                        if is_call and dice.random() < 0.7:
                            said_to_it = dice.choice([{}, {"attached": wire.AttachResponse()}, DETACHED])
                            answer = wire.GateAnswer(call=down.call.call, **said_to_it)
                            await call.write(wire.GateUp(answer=answer).SerializeToString())
                finally:
                    talking.cancel()
    return called


async def _talk(call: Any, said: wire.GateUp) -> None:
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            await call.write(said.SerializeToString())
            await asyncio.sleep(0.5)


@pytest.mark.parametrize(
    "seconds", [pytest.param(10, marks=pytest.mark.extended), pytest.param(600, marks=pytest.mark.long)]
)
@pytest.mark.timeout(900)
async def test_a_crowd_at_the_gate_disturbs_no_session_and_leaves_nothing(seconds: int, prompts: list[str]) -> None:
    async with cluster() as running, AsyncClient(running.router_address) as client:
        plain = {
            prompt: (await client.generate(prompt, speculation="off", **TERMS)).token_ids for prompt in prompts[:4]
        }
        until = time.monotonic() + seconds

        async def ask(prompt: str) -> int:
            answers = 0
            while time.monotonic() < until:
                answer = await asyncio.wait_for(client.generate(prompt, **TERMS), 30)
                assert answer.token_ids == plain[prompt]
                answers += 1
            return answers

        crowd = [asyncio.create_task(come_and_go(running, random.Random(seed), until)) for seed in range(CROWD)]
        answers = await asyncio.gather(*map(ask, plain))
        called = await asyncio.gather(*crowd)
        assert min(answers) >= seconds / 10
        assert sum(called) > sum(answers) / 10
        async with dialed(running.router_address):
            assert await drafted(client, prompts[4])
        async with aclosing(connect(running.redis_url)) as redis, asyncio.timeout(10):
            while await Registry(redis).workers("drafter"):
                await asyncio.sleep(0.2)
