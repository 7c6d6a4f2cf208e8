"""The target's answers to tenants that allow it are kept for drafters to learn from, and callers see nothing of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from outrider.core.session.training_samples import TOP, TrainingSample
from outrider.store.api_keys import Keys
from outrider.store.training_samples import TrainingSampleStore
from outrider.v1 import inference_pb2 as pb
from tests.router.fakes import FakeVerifier, announced
from tests.router.rig import MODEL, SCRIPT, Restartable, Rig, ask, collect, running_router
from tests.router.test_tenants import bearer

STREAMS = "outrider:{examples}:*"


async def kept(client: Redis) -> list[TrainingSample]:
    found, _ = await TrainingSampleStore(client, MODEL.name, MODEL.digest).after("0", 1000)
    return found


async def arrived(rig: Rig, count: int) -> list[TrainingSample]:
    while len(examples := await kept(rig.client)) < count:
        await asyncio.sleep(0.005)
    return examples


async def test_a_finished_text_is_kept_with_the_targets_log_probabilities(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, stride=3)
    async with running_router(redis_url, teaches=["*"]) as rig, announced(verifier, rig.registry, MODEL.digest):
        _, chunks, _ = await collect(rig.stub.Generate(ask(max_tokens=8)))
        (example,) = await arrived(rig, 1)
    answer = [token for chunk in chunks for token in chunk.token_ids]
    assert verifier.starts[0].contract.logprobs == TOP
    assert example.tokens.tolist() == [*verifier.starts[0].tokens, *answer]
    assert (example.chosen, example.greedy) == (8, False)
    assert example.ids.shape == (8, TOP)
    assert not any(chunk.logprobs for chunk in chunks)  # the caller asked for none


@pytest.mark.parametrize("asked", [0, 3, TOP, 20])
async def test_callers_get_as_many_alternatives_as_without(redis_url: str, asked: int) -> None:
    answers: list[list[pb.Chunk]] = []
    for teaches in ([], ["*"]):
        verifier = FakeVerifier(SCRIPT, stride=2)
        async with running_router(redis_url, teaches=teaches) as rig, announced(verifier, rig.registry, MODEL.digest):
            _, chunks, _ = await collect(rig.stub.Generate(ask(max_tokens=6, temperature=0, logprobs=asked)))
            answers.append(chunks)
            if teaches:
                (example,) = await arrived(rig, 1)
                assert example.ids.shape == (6, TOP)
                assert example.greedy
    assert answers[0] == answers[1]
    assert all(len(entry.top_ids) == asked for chunk in answers[1] for entry in chunk.logprobs)


async def test_no_sample_is_kept_of_a_tenant_that_did_not_allow_it(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT)
    async with (
        running_router(redis_url, auth="keys", teaches=["one"]) as rig,
        announced(verifier, rig.registry, MODEL.digest),
    ):
        keys = Keys(rig.client)
        for tenant in ("two", "one"):
            metadata = bearer((await keys.add(tenant))[0])
            await collect(rig.stub.Generate(ask(max_tokens=4, seed=1), metadata=metadata))
        (example,) = await arrived(rig, 1)
    two, one = verifier.starts
    assert not two.contract.HasField("logprobs")
    assert one.contract.logprobs == TOP
    assert example.chosen == 4


async def test_a_router_keeps_no_samples_unless_configured(redis_url: str) -> None:
    async with running_router(redis_url) as rig, announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest):
        await collect(rig.stub.Generate(ask(max_tokens=4)))
        assert await rig.client.keys(STREAMS) == []


async def test_a_text_that_moved_gives_a_sample_of_both_parts(redis_url: str) -> None:
    first, second = FakeVerifier(SCRIPT), FakeVerifier(SCRIPT)
    first.moves_after = 3
    async with (
        running_router(redis_url, teaches=["*"]) as rig,
        announced(first, rig.registry, MODEL.digest),
        announced(second, rig.registry, MODEL.digest, sessions=7),
    ):
        await collect(rig.stub.Generate(ask(max_tokens=8)))
        (example,) = await arrived(rig, 1)
    assert example.chosen == 8


async def test_no_samples_are_kept_and_no_call_waits_while_redis_is_down(tmp_path: Path) -> None:
    server = Restartable(tmp_path)
    written: list[Any] = []
    try:
        async with (
            running_router(server.url, teaches=["*"]) as rig,
            announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest),
        ):
            await rig.client.set(f"outrider:{{examples}}:{MODEL.name}:{MODEL.digest.hex()}", "no stream")
            _, chunks, _ = await collect(rig.stub.Generate(ask(max_tokens=4)))
            assert sum(len(chunk.token_ids) for chunk in chunks) == 4
            await rig.client.delete(f"outrider:{{examples}}:{MODEL.name}:{MODEL.digest.hex()}")
            _, chunks, _ = await collect(rig.stub.Generate(ask(max_tokens=5)))
            written += await arrived(rig, 1)
            server.kill()
            server.start()
            _, chunks, _ = await collect(rig.stub.Generate(ask(max_tokens=6)))
            written += (await arrived(rig, 2))[1:]
    finally:
        server.kill()
    assert [example.chosen for example in written] == [5, 6]
