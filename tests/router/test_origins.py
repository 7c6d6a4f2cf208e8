"""A text that has begun goes on only where the protocol and the weights are those that it began with."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.core.session.protocol import PROTOCOL, UNKNOWN_ORIGIN, Origin
from outrider.v1 import inference_pb2 as pb
from tests.router.fakes import FakeDrafter, FakeVerifier, announced
from tests.router.rig import MODEL, SCRIPT, ask, collect, drain, released, running_router, until

OTHERS = [
    ({"weights": "b" * 64, "dtype": "bfloat16"}, f"protocol {PROTOCOL} and weights {'b' * 16} in bfloat16"),
    ({"weights": "a" * 64, "dtype": "int8"}, f"weights {'a' * 16} in int8"),
    ({"weights": "", "dtype": "bfloat16"}, "weights unknown in bfloat16"),
    ({"weights": "a" * 64, "protocol": PROTOCOL + 1}, f"speaks protocol {PROTOCOL + 1}, and this router {PROTOCOL}"),
    ({"weights": "a" * 64, "protocol": 0}, f"speaks protocol unknown, and this router {PROTOCOL}"),
]
SAME = {"weights": "a" * 64, "dtype": "bfloat16"}


async def details(call: Any, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drain(call)
    assert caught.value.code() == code
    return str(caught.value.details())


@pytest.mark.parametrize("moves", [False, True], ids=["dies", "drains"])
@pytest.mark.parametrize(
    ("other", "named"), OTHERS, ids=["weights", "dtype", "unknown-weights", "protocol", "no-protocol"]
)
async def test_a_text_never_continues_at_a_verifier_that_might_change_it(
    redis_url: str, other: dict[str, Any], named: str, moves: bool
) -> None:
    first, foreign, same = (FakeVerifier(SCRIPT, pace_s=0.02) for _ in range(3))
    first.moves_after = 5 if moves else None
    async with running_router(redis_url, failover_wait_s=0.5) as rig, AsyncExitStack() as stack:
        async with announced(first, rig.registry, MODEL.digest, **SAME) as worker:
            call = rig.stub.Generate(ask(max_tokens=len(SCRIPT)))
            session = (await call.read()).started.session_id
            await call.read()
            await stack.enter_async_context(announced(foreign, rig.registry, MODEL.digest, **other))
            if moves:
                problem = await details(call)
            await rig.registry.withdraw(worker)
        if not moves:
            problem = await details(call)
        assert named in problem
        await released(rig, session)
        record = await rig.sessions.get(session)
        assert record.origin == Origin(PROTOCOL, "a" * 64, "bfloat16")
        assert named in await details(rig.stub.Resume(pb.ResumeRequest(session_id=session)))
        assert foreign.starts == []
        await released(rig, session)
        async with announced(same, rig.registry, MODEL.digest, **SAME):
            events = await drain(rig.stub.Resume(pb.ResumeRequest(session_id=session)))
        assert [token for event in events for token in event.chunk.token_ids] == SCRIPT
        assert foreign.starts == []


async def test_a_text_without_a_recorded_origin_is_not_continued(redis_url: str) -> None:
    first, second = FakeVerifier(SCRIPT, pace_s=0.02), FakeVerifier(SCRIPT)
    async with running_router(redis_url, failover_wait_s=0.2) as rig, announced(first, rig.registry, MODEL.digest):
        call = rig.stub.Generate(ask(max_tokens=len(SCRIPT)))
        session = (await call.read()).started.session_id
        await call.read()
        call.cancel()
        await released(rig, session)
        await rig.client.hdel(f"outrider:{{{session}}}:session", "origin")
        async with announced(second, rig.registry, MODEL.digest):
            problem = await details(rig.stub.Resume(pb.ResumeRequest(session_id=session)))
        assert f"began under {UNKNOWN_ORIGIN}" in problem


async def test_the_next_turn_of_a_session_may_use_other_weights(redis_url: str) -> None:
    async with running_router(redis_url) as rig:
        async with announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest, weights="a") as worker:
            started, _, _ = await collect(rig.stub.Generate(ask(max_tokens=4)))
            await rig.registry.withdraw(worker)
        async with announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest, weights="b"):
            request = ask("b", max_tokens=4)
            request.session_id = started.session_id
            again, _, _ = await collect(rig.stub.Generate(request))
        assert again.generation == 2
        assert (await rig.sessions.get(started.session_id)).origin == Origin(PROTOCOL, "b", "")


async def test_a_standby_has_the_weights_that_began_the_text(redis_url: str) -> None:
    verifiers = [FakeVerifier(SCRIPT, pace_s=0.005) for _ in range(3)]
    async with running_router(redis_url, standby=True) as rig, AsyncExitStack() as stack:
        for verifier, sessions, weights in zip(verifiers, (0, 1, 2), ("a", "b", "a"), strict=True):
            await stack.enter_async_context(
                announced(verifier, rig.registry, MODEL.digest, weights=weights, sessions=sessions)
            )
        await asyncio.sleep(0.3)
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[7] * 40), sampling=pb.Sampling(max_tokens=24, ignore_eos=True)
        )
        await collect(rig.stub.Generate(request))
        serving = next(one for one in verifiers if one.starts)
        assert serving is not verifiers[1]
        (standby,) = (one for one in (verifiers[0], verifiers[2]) if one is not serving)
        await until(lambda: bool(standby.warmed))
        assert verifiers[1].warmed == []


async def test_workers_of_another_protocol_are_ignored_and_named_once(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "router.scheduling.workers")
    verifier, drafter = FakeVerifier(SCRIPT), FakeDrafter()
    async with running_router(redis_url) as rig:
        foreign = {"protocol": PROTOCOL + 1}
        async with (
            announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest, **foreign),
            announced(drafter, rig.registry, MODEL.digest, **foreign),
            announced(verifier, rig.registry, MODEL.digest),
        ):
            for _ in range(4):
                await collect(rig.stub.Generate(ask(max_tokens=4)))
            (model,) = (await rig.stub.ListModels(pb.ListModelsRequest())).models
        assert len(verifier.starts) == 4
        assert drafter.asked == 0
        assert (model.verifiers, model.drafters, len(model.misfits)) == (1, 0, 2)
        assert all(f"speaks protocol {PROTOCOL + 1}, and this router {PROTOCOL}" in line for line in model.misfits)
        assert len([record for record in caplog.records if "is not used" in record.message]) == 2
