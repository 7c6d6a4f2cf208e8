"""With `auth = "keys"` no call is served without a key, and what is another tenant's is not there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.store.keys import Keys
from outrider.v1 import inference_pb2 as pb
from tests.router.fakes import FakeVerifier, announced
from tests.router.rig import MODEL, SCRIPT, Rig, ask, collect, drain, running_router, until

REQUESTS: dict[str, Any] = {
    "Generate": ask(max_tokens=2),
    "Resume": pb.ResumeRequest(session_id="0" * 32),
    "Cancel": pb.CancelRequest(session_id="0" * 32),
    "CreateSession": pb.CreateSessionRequest(),
    "GetSession": pb.GetSessionRequest(session_id="0" * 32),
    "CloseSession": pb.CloseSessionRequest(session_id="0" * 32),
    "Watch": pb.WatchSessionRequest(session_id="nobody"),
    "ListModels": pb.ListModelsRequest(),
    "LoadAdapter": pb.LoadAdapterRequest(name="sql", folder="sql"),
    "UnloadAdapter": pb.UnloadAdapterRequest(name="sql"),
    "CheckKey": pb.CheckKeyRequest(),
    "Answers": pb.AnswersRequest(),
}

Metadata = tuple[tuple[str, str], ...]


def bearer(secret: str) -> Metadata:
    return (("authorization", f"Bearer {secret}"),)


@asynccontextmanager
async def two_tenants(redis_url: str, verifier: FakeVerifier) -> AsyncIterator[tuple[Rig, Metadata, Metadata]]:
    """A router with keys, and the metadata of its two tenants."""
    async with running_router(redis_url, auth="keys") as rig, announced(verifier, rig.registry, MODEL.digest):
        keys = Keys(rig.client)
        yield rig, bearer((await keys.add("one"))[0]), bearer((await keys.add("two"))[0])


async def outcome(rig: Rig, method: str, request: Any, metadata: Metadata) -> tuple[Any, ...]:
    """All that a caller can observe: status, text and trailers, or the answer.

    On a stream of requests none is sent: gRPC for Python reports INTERNAL when it sends one to a call that has just
    been refused.
    """
    call = getattr(rig.stub, method)(None if method == "Answers" else request, metadata=metadata)
    try:
        answer = await drain(call) if hasattr(call, "read") else await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details(), tuple(error.trailing_metadata() or ())
    return grpc.StatusCode.OK, answer, tuple(await call.trailing_metadata())


def test_every_method_is_here() -> None:
    assert set(REQUESTS) == set(pb.DESCRIPTOR.services_by_name["Inference"].methods_by_name)


@pytest.mark.parametrize(("listen", "warned"), [("127.0.0.1:0", False), ("0.0.0.0:0", True)])
async def test_keys_that_would_cross_the_network_in_the_clear_are_warned_of(
    redis_url: str, caplog: pytest.LogCaptureFixture, listen: str, warned: bool
) -> None:
    async with running_router(redis_url, auth="keys", listen=listen):
        assert ("in the clear" in caplog.text) is warned


@pytest.mark.parametrize("method", REQUESTS)
async def test_no_method_is_for_callers_without_a_key(redis_url: str, method: str) -> None:
    async with running_router(redis_url, auth="keys") as rig:
        good, _ = await Keys(rig.client).add("one")
        bad: list[Metadata] = [
            (),
            bearer("outrider_wrong"),
            (("authorization", good),),
            (("authorization", f"Basic {good}"),),
            bearer(good) * 2,
        ]
        for metadata in bad:
            code, details, _ = await outcome(rig, method, REQUESTS[method], metadata)
            assert code is grpc.StatusCode.UNAUTHENTICATED
            assert "outrider keys add" in details
            assert good not in details


@pytest.mark.parametrize("method", REQUESTS)
async def test_an_expired_key_answers_as_one_that_never_was(redis_url: str, method: str) -> None:
    async with running_router(redis_url, auth="keys") as rig:
        expired, _ = await Keys(rig.client).add("one", valid_s=0.001)
        await asyncio.sleep(0.01)
        code, details, trailers = await outcome(rig, method, REQUESTS[method], bearer(expired))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert (code, details, trailers) == await outcome(rig, method, REQUESTS[method], bearer("outrider_never"))


async def test_another_tenants_session_answers_as_one_that_does_not_exist(redis_url: str) -> None:
    async with two_tenants(redis_url, FakeVerifier(SCRIPT)) as (rig, mine, foreign):
        started, _, _ = await collect(rig.stub.Generate(ask(max_tokens=4), metadata=mine))
        there, absent = started.session_id, "f" * 32
        assert (await rig.stub.GetSession(pb.GetSessionRequest(session_id=there), metadata=mine)).length > 0
        for method, request in REQUESTS.items():
            if not hasattr(request, "session_id"):
                continue
            seen = []
            for session_id in (there, absent):
                asked = type(request)()
                asked.CopyFrom(request)
                asked.session_id = session_id
                code, details, trailers = await outcome(rig, method, asked, foreign)
                seen.append((code, str(details).replace(session_id, "ID"), trailers))
            assert seen[0] == seen[1], method
        assert (await rig.stub.GetSession(pb.GetSessionRequest(session_id=there), metadata=mine)).length > 0


async def test_another_tenant_can_neither_cancel_nor_close_what_runs(redis_url: str) -> None:
    async with two_tenants(redis_url, FakeVerifier(SCRIPT, pace_s=0.02)) as (rig, mine, foreign):
        call = rig.stub.Generate(ask(max_tokens=20), metadata=mine)
        events: list[pb.GenerateResponse] = [await call.read()]
        session_id = events[0].started.session_id
        await rig.stub.CloseSession(pb.CloseSessionRequest(session_id=session_id), metadata=foreign)
        with pytest.raises(grpc.aio.AioRpcError):
            await rig.stub.Cancel(pb.CancelRequest(session_id=session_id), metadata=foreign)
        await drain(call, events)
        assert events[-1].finished.usage.completion_tokens == 20


async def test_sessions_and_what_verifiers_share_carry_the_tenant(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT)
    async with two_tenants(redis_url, verifier) as (rig, one, two):
        for metadata in (one, two):
            await collect(rig.stub.Generate(ask(max_tokens=2), metadata=metadata))
        created = await rig.stub.CreateSession(pb.CreateSessionRequest(), metadata=two)
        assert (await rig.sessions.get(created.session_id)).tenant == "two"
        turn = ask(max_tokens=2)
        turn.session_id = created.session_id
        await collect(rig.stub.Generate(turn, metadata=two))
    assert [start.tenant for start in verifier.starts] == ["one", "two", "two"]


async def test_an_idempotency_key_is_its_tenants_own(redis_url: str) -> None:
    async with two_tenants(redis_url, FakeVerifier(SCRIPT)) as (rig, one, two):
        request = ask(max_tokens=2, seed=1)
        request.idempotency_key = "same"
        ids = [(await collect(rig.stub.Generate(request, metadata=who)))[0].session_id for who in (one, two, one)]
        assert ids[0] == ids[2] != ids[1]


async def test_a_revoked_key_is_refused_within_seconds_and_what_runs_goes_on(redis_url: str) -> None:
    async with (
        running_router(redis_url, auth="keys") as rig,
        announced(FakeVerifier(SCRIPT, pace_s=0.1), rig.registry, MODEL.digest),
    ):
        keys = Keys(rig.client)
        secret, key = await keys.add("one")
        call = rig.stub.Generate(ask(max_tokens=30), metadata=bearer(secret))
        await call.read()
        await keys.revoke(key.key_id)
        refused = False
        async with asyncio.timeout(5):
            while not refused:
                code, *_ = await outcome(rig, "ListModels", pb.ListModelsRequest(), bearer(secret))
                refused = code is grpc.StatusCode.UNAUTHENTICATED
        assert (await drain(call))[-1].finished.usage.completion_tokens == 30


async def test_without_keys_everybody_is_one_tenant(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT)
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        await collect(rig.stub.Generate(ask(max_tokens=2), metadata=bearer("whatever")))
        await until(lambda: bool(verifier.starts))
    assert verifier.starts[0].tenant == ""
