"""An idempotency key is claimed once its request has been checked, counts in its tenant's storage, and gives one answer
to requests that are equal."""

from __future__ import annotations

import asyncio
import itertools
import random
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.store.tenant_storage import CLAIM_BYTES
from outrider.v1 import inference_pb2 as pb
from outrider.v1 import types_pb2
from tests.router.fakes import CONTEXT, FakeVerifier, announced
from tests.router.rig import MODEL, SCRIPT, Rig, collect, drain, running_router

OF_THE_CLUSTER = "outrider:{workers}", "outrider:{tickets}", "outrider:{acceptance}", "outrider:{leases}"


def asked(text: str = "a = 1\n", *, session: str = "", key: str = "k", **more: Any) -> pb.GenerateRequest:
    sampling = {"max_tokens": 4, **more.pop("sampling", {})}
    return pb.GenerateRequest(
        text=text, session_id=session, idempotency_key=key, sampling=pb.Sampling(**sampling), **more
    )


async def stored(rig: Rig) -> set[tuple[bytes, bytes]]:
    """What Redis has of sessions and tenants."""
    names = [name for name in await rig.client.keys() if not name.decode().startswith(OF_THE_CLUSTER)]
    return {(name, await rig.client.dump(name)) for name in names}


async def refusal(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drain(call)
    return caught.value.code()


REFUSED = {
    "tokens": (asked("x " * CONTEXT), "INVALID_ARGUMENT"),
    "max_tokens": (asked(sampling={"max_tokens": CONTEXT}), "INVALID_ARGUMENT"),
    "min_tokens": (asked(sampling={"max_tokens": 0, "min_tokens": CONTEXT}), "INVALID_ARGUMENT"),
    "ids": (asked(sampling={"banned_ids": [4096]}), "INVALID_ARGUMENT"),
    "grammar": (asked(sampling={"grammar": types_pb2.Grammar(kind="regex", text="(")}), "INVALID_ARGUMENT"),
    "storage": (asked(sampling={"max_tokens": 50, "logprobs": 20}), "RESOURCE_EXHAUSTED"),
}


@pytest.mark.parametrize("name", [*REFUSED])
async def test_a_refused_request_leaves_nothing_in_redis(redis_url: str, name: str) -> None:
    request, code = REFUSED[name]
    verifier = FakeVerifier(SCRIPT)
    async with (
        running_router(redis_url, tenant_stored_bytes=8_000) as rig,
        announced(verifier, rig.registry, MODEL.digest),
    ):
        await collect(rig.stub.Generate(asked(key="another")))
        await asyncio.sleep(0.1)  # until what it wrote is counted
        before = await stored(rig)
        assert (await refusal(rig.stub.Generate(request))).name == code
        assert await stored(rig) == before
        request.sampling.CopyFrom(pb.Sampling(max_tokens=4))
        request.text = "a = 1\n"
        await collect(rig.stub.Generate(request))  # the key is free


async def test_a_request_that_no_verifier_serves_leaves_nothing_in_redis(redis_url: str) -> None:
    async with running_router(redis_url, queue=4) as rig:
        verifier = FakeVerifier(SCRIPT)
        async with announced(verifier, rig.registry, MODEL.digest) as worker:
            await asyncio.sleep(0.5)
            await rig.registry.withdraw(worker)
            assert await refusal(rig.stub.Generate(asked())) == grpc.StatusCode.UNAVAILABLE
        assert await stored(rig) == set()


async def test_a_turn_of_a_session_that_is_busy_leaves_nothing_in_redis(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.05)
    async with (
        running_router(redis_url, tenant_stored_bytes=100_000) as rig,
        announced(verifier, rig.registry, MODEL.digest),
    ):
        running = rig.stub.Generate(asked(key="first", sampling={"max_tokens": 40}))
        session = (await running.read()).started.session_id
        before = {name for name, _ in await stored(rig)}
        for number in range(3):
            assert await refusal(rig.stub.Generate(asked("b", session=session, key=f"{number}"))) == (
                grpc.StatusCode.ALREADY_EXISTS
            )
        assert {name for name, _ in await stored(rig)} == before
        assert len(await rig.client.keys("outrider:idempotency:*")) == 1
        running.cancel()


async def test_an_idempotency_record_counts_for_its_tenant_after_its_session_closed(redis_url: str) -> None:
    async with (
        running_router(redis_url, tenant_stored_bytes=12 * CLAIM_BYTES) as rig,
        announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest),
    ):
        served, problem = 0, ""
        while not problem:
            try:
                started, _, _ = await collect(rig.stub.Generate(asked(key=f"{served}")))
            except grpc.aio.AioRpcError as error:
                problem = str(error.details())
            else:
                served += 1
                await rig.stub.CloseSession(pb.CloseSessionRequest(session_id=started.session_id))
        assert "tenant_stored_bytes" in problem
        assert 0 < served == len(await rig.client.keys("outrider:idempotency:*")) < 12


async def test_concurrent_equal_requests_get_one_answer_from_either_router(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.002)
    async with (
        running_router(redis_url, tenant_stored_bytes=1_000_000) as one,
        running_router(redis_url, tenant_stored_bytes=1_000_000) as two,
        announced(verifier, one.registry, MODEL.digest),
    ):

        async def answer(rig: Rig) -> str:
            for attempt in itertools.count():
                events: list[pb.GenerateResponse] = []
                with suppress(grpc.aio.AioRpcError):  # another call took the generation over
                    await drain(rig.stub.Generate(asked()), events)
                if events and events[-1].HasField("finished"):
                    assert [token for event in events for token in event.chunk.token_ids] == SCRIPT[:4]
                    return events[0].started.session_id
                await asyncio.sleep(random.uniform(0.0, 0.05 * attempt))  # or they interrupt one another for ever
            raise AssertionError

        found = set(await asyncio.gather(*(answer(rig) for rig in (one, two) * 8)))
        assert len(found) == 1
        assert len(await one.client.keys("outrider:{*}:session")) == 1
        assert len(await one.client.keys("outrider:idempotency:*")) == 1
