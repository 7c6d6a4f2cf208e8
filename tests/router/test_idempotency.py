"""An idempotency key is claimed once its request has been checked, counts in its tenant's storage, and gives one answer
to requests that are equal."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.config import RouterConfig
from outrider.core.session.digest import EMPTY, extend
from outrider.store.sessions import Sessions, SessionTurn
from outrider.store.tenant_storage import CLAIM_BYTES
from outrider.v1 import inference_pb2 as pb
from outrider.v1 import types_pb2
from router.requests.requests import parse
from tests.router.fakes import CONTEXT, FakeVerifier, announced
from tests.router.rig import FOLDER, MODEL, SCRIPT, Rig, collect, drain, running_router

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
    verifier = FakeVerifier(SCRIPT, pace_s=0.02)
    async with (
        running_router(redis_url, tenant_stored_bytes=1_000_000) as one,
        running_router(redis_url, tenant_stored_bytes=1_000_000, max_sessions=2) as two,
        announced(verifier, one.registry, MODEL.digest),
    ):

        async def answer(rig: Rig, delay_s: float) -> str:
            await asyncio.sleep(delay_s)
            events = await drain(rig.stub.Generate(asked(sampling={"max_tokens": 20})))
            kinds = [event.WhichOneof("event") for event in events]
            assert kinds[-1] == "finished"
            assert kinds.count("started") == 1
            assert [token for event in events for token in event.chunk.token_ids] == SCRIPT[:20]
            return events[kinds.index("started")].started.session_id

        delays = [0.0, 0.0, 0.05, 0.2] * 4
        found = set(
            await asyncio.gather(*(answer(rig, delay) for rig, delay in zip((one, two) * 8, delays, strict=True)))
        )
        assert len(found) == 1
        assert len(await one.client.keys("outrider:{*}:session")) == 1
        assert len(await one.client.keys("outrider:idempotency:*")) == 1
        assert len(verifier.starts) == 1


@pytest.mark.parametrize("elsewhere", [False, True], ids=["its-router", "another-router"])
async def test_a_request_that_waits_for_an_equal_one_goes_on_with_it_when_its_caller_leaves(
    redis_url: str, elsewhere: bool
) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.02)
    async with (
        running_router(redis_url) as one,
        running_router(redis_url) as two,
        announced(verifier, one.registry, MODEL.digest),
    ):
        request = asked(sampling={"max_tokens": 20})
        leading = one.stub.Generate(request)
        session = (await leading.read()).started.session_id
        following = (two if elsewhere else one).stub.Generate(request)
        assert (await following.read()).HasField("following")
        await leading.read()
        assert (await one.sessions.get(session)).epoch == 1  # nobody took it over
        leading.cancel()
        started, chunks, _ = await collect(following)
        assert started.session_id == session
        assert [token for chunk in chunks for token in chunk.token_ids] == SCRIPT[:20]
        assert len(verifier.starts) == 2


async def test_a_waiting_request_takes_over_from_a_router_whose_lease_has_ended(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT)
    async with running_router(redis_url, lease_s=0.6) as rig, announced(verifier, rig.registry, MODEL.digest):
        request = asked(sampling={"max_tokens": 20})
        params = parse(request, {"target": MODEL}, RouterConfig(models={"target": FOLDER}))
        prompt = MODEL.tokenizer.encode("a = 1\n").ids
        await rig.sessions.claim("", "k", params.fingerprint, "f" * 32 + "/1")
        await rig.sessions.create("f" * 32, "", "target", MODEL.digest)
        turn = SessionTurn(params.contract, (), len(prompt), None, params.request_id)
        dead = Sessions(rig.client, ttl_s=60, lease_s=0.6, resume_ttl_s=30)
        await dead.begin("f" * 32, 0, "a-dead-router/1", turn, 0, prompt, extend(EMPTY, prompt))
        waiting = rig.stub.Generate(request)
        assert (await waiting.read()).HasField("following")
        began = time.monotonic()
        started, chunks, _ = await collect(waiting)
        assert 0.3 < time.monotonic() - began < 2.0
        assert started.session_id == "f" * 32
        assert [token for chunk in chunks for token in chunk.token_ids] == SCRIPT[:20]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["its-router", "another-router"])
async def test_a_call_that_broke_off_takes_over_from_other_routers_alone(redis_url: str, elsewhere: bool) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.05)
    async with (
        running_router(redis_url) as one,
        running_router(redis_url) as two,
        announced(verifier, one.registry, MODEL.digest),
    ):
        request = asked(sampling={"max_tokens": 10})
        leading = one.stub.Generate(request)
        await leading.read()
        reader = asyncio.create_task(drain(leading))
        request.broke_off = True
        again = await drain((two if elsewhere else one).stub.Generate(request))
        assert [token for event in again for token in event.chunk.token_ids] == SCRIPT[:10]
        assert again[0].HasField("started" if elsewhere else "following")
        if elsewhere:
            with pytest.raises(grpc.aio.AioRpcError, match="belongs to"):
                await reader
        else:
            assert (await reader)[-1].HasField("finished")


async def test_the_requests_that_wait_for_equal_ones_are_bounded_and_hold_no_slot(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.05)
    async with (
        running_router(redis_url, max_sessions=2, queue_per_tenant=2) as rig,
        announced(verifier, rig.registry, MODEL.digest),
    ):
        calls = [rig.stub.Generate(asked(sampling={"max_tokens": 20})) for _ in range(1)]
        await calls[0].read()
        for _ in range(2):
            calls.append(rig.stub.Generate(asked(sampling={"max_tokens": 20})))
            assert (await calls[-1].read()).HasField("following")
        assert await refusal(rig.stub.Generate(asked(sampling={"max_tokens": 20}))) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED
        )
        await collect(rig.stub.Generate(asked("b", key="other")))  # has the second slot
        for call in calls:
            assert (await drain(call))[-1].HasField("finished")
