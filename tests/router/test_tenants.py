"""With `auth = "keys"` no call is served without a key, and what is another tenant's is not there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

import outrider
from outrider.errors import Forbidden
from outrider.store.api_keys import Keys
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
    "Tokenize": pb.TokenizeRequest(prompt=ask()),
    "Detokenize": pb.DetokenizeRequest(),
    "KeepResponse": pb.KeepResponseRequest(id="resp_1", items=b"[]"),
    "FindResponse": pb.FindResponseRequest(id="resp_1"),
    "Answers": pb.AnswersRequest(),
}

Metadata = tuple[tuple[str, str], ...]


def bearer(secret: str) -> Metadata:
    return (("authorization", f"Bearer {secret}"),)


@asynccontextmanager
async def two_tenants(
    redis_url: str, verifier: FakeVerifier, **config: Any
) -> AsyncIterator[tuple[Rig, Metadata, Metadata]]:
    """A router with keys, and the metadata of its two tenants, one and two."""
    async with running_router(redis_url, auth="keys", **config) as rig, announced(verifier, rig.registry, MODEL.digest):
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


def test_every_method_has_a_request_in_this_test() -> None:
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
async def test_an_expired_key_is_answered_like_an_unknown_one(redis_url: str, method: str) -> None:
    async with running_router(redis_url, auth="keys") as rig:
        expired, _ = await Keys(rig.client).add("one", valid_s=0.001)
        await asyncio.sleep(0.01)
        code, details, trailers = await outcome(rig, method, REQUESTS[method], bearer(expired))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert (code, details, trailers) == await outcome(rig, method, REQUESTS[method], bearer("outrider_never"))


async def test_another_tenants_session_is_answered_like_an_unknown_one(redis_url: str) -> None:
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


async def test_another_tenant_can_neither_cancel_nor_close_a_running_generation(redis_url: str) -> None:
    async with two_tenants(redis_url, FakeVerifier(SCRIPT, pace_s=0.02)) as (rig, mine, foreign):
        call = rig.stub.Generate(ask(max_tokens=20), metadata=mine)
        events: list[pb.GenerateResponse] = [await call.read()]
        session_id = events[0].started.session_id
        await rig.stub.CloseSession(pb.CloseSessionRequest(session_id=session_id), metadata=foreign)
        with pytest.raises(grpc.aio.AioRpcError):
            await rig.stub.Cancel(pb.CancelRequest(session_id=session_id), metadata=foreign)
        await drain(call, events)
        assert events[-1].finished.usage.completion_tokens == 20


async def test_sessions_and_verifier_calls_carry_the_tenant(redis_url: str) -> None:
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


async def test_a_revoked_key_is_refused_within_seconds_and_running_calls_continue(redis_url: str) -> None:
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


async def test_all_callers_without_keys_are_one_tenant(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT)
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        await collect(rig.stub.Generate(ask(max_tokens=2), metadata=bearer("whatever")))
        await until(lambda: bool(verifier.starts))
    assert verifier.starts[0].tenant == ""


async def adapters_of(rig: Rig, metadata: Metadata) -> dict[str, str]:
    """The folders of the adapters that a tenant is shown, by name."""
    (model,) = (await rig.stub.ListModels(pb.ListModelsRequest(), metadata=metadata)).models
    return {it.name: it.folder for it in model.adapters}


async def generate_with(rig: Rig, verifier: FakeVerifier, model: str, metadata: Metadata) -> str:
    """The folder of the adapter that a generation of a tenant has."""
    request = ask(max_tokens=2)
    request.model = model
    await drain(rig.stub.Generate(request, metadata=metadata))
    return verifier.starts[-1].contract.adapter.folder


async def assert_absent(rig: Rig, name: str, metadata: Metadata) -> None:
    """Whatever a tenant asks with an adapter's name is answered as with a name that nobody ever gave."""
    assert name not in await adapters_of(rig, metadata)
    for make in (
        lambda it: ("Generate", pb.GenerateRequest(model=it, text="import os")),
        lambda it: ("Generate", pb.GenerateRequest(model=f"target:{it}", text="import os")),
        lambda it: ("CreateSession", pb.CreateSessionRequest(model=it)),
        lambda it: ("UnloadAdapter", pb.UnloadAdapterRequest(name=it)),
    ):
        seen = []
        for asked in (name, "never"):
            method, request = make(asked)
            code, details, trailers = await outcome(rig, method, request, metadata)
            assert code is not grpc.StatusCode.OK
            seen.append((code, str(details).replace(asked, "NAME"), trailers))
        assert seen[0] == seen[1], method


async def test_another_tenants_adapter_is_answered_like_an_unknown_one(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT)
    verifier.folders = {"one/sql", "two/sql", "one/own"}
    async with two_tenants(redis_url, verifier, adapter_loaders=("*",)) as (rig, mine, foreign):
        loaded = await rig.stub.LoadAdapter(pb.LoadAdapterRequest(name="sql", folder="sql"), metadata=mine)
        assert loaded.folder == "one/sql"
        await assert_absent(rig, "sql", foreign)
        request = pb.LoadAdapterRequest(name="sql", folder="sql")
        assert (await rig.stub.LoadAdapter(request, metadata=foreign)).folder == "two/sql"
        for metadata, folder in ((mine, "one/sql"), (foreign, "two/sql")):
            assert await adapters_of(rig, metadata) == {"sql": folder}
            assert await generate_with(rig, verifier, "sql", metadata) == folder
            assert await generate_with(rig, verifier, "target:sql", metadata) == folder
        await rig.stub.UnloadAdapter(pb.UnloadAdapterRequest(name="sql"), metadata=foreign)
        await assert_absent(rig, "sql", foreign)
        assert await generate_with(rig, verifier, "sql", mine) == "one/sql"


@pytest.mark.parametrize("folder", ["own", "../one/own", "sql/../../one/own", "/one/own", "one/own", "./../one/own"])
async def test_a_tenant_loads_from_no_other_tenants_folder(redis_url: str, folder: str) -> None:
    verifier = FakeVerifier(SCRIPT)
    verifier.folders = {"own", "one/own", "two/sql", "/one/own", "../one/own"}
    async with two_tenants(redis_url, verifier, adapter_loaders=("*",)) as (rig, _, foreign):
        request = pb.LoadAdapterRequest(name="x", folder=folder)
        code, details, _ = await outcome(rig, "LoadAdapter", request, foreign)
        assert (code, "is not here" in details) == (grpc.StatusCode.NOT_FOUND, True)


async def test_a_publishers_adapter_serves_all_tenants_and_only_publishers_replace_it(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT)
    verifier.folders = {"sql", "two/mine"}
    async with two_tenants(redis_url, verifier, adapter_loaders=("*",), adapter_publishers=("one",)) as (
        rig,
        publisher,
        other,
    ):
        await rig.stub.LoadAdapter(pb.LoadAdapterRequest(name="sql", folder="sql"), metadata=publisher)
        for metadata in (publisher, other):
            assert await adapters_of(rig, metadata) == {"sql": "sql"}
            assert await generate_with(rig, verifier, "sql", metadata) == "sql"
        unload = pb.UnloadAdapterRequest(name="sql")
        assert (await outcome(rig, "UnloadAdapter", unload, other))[0] is grpc.StatusCode.NOT_FOUND
        await rig.stub.LoadAdapter(pb.LoadAdapterRequest(name="sql", folder="mine"), metadata=other)
        assert await adapters_of(rig, other) == {"sql": "two/mine"}
        assert await generate_with(rig, verifier, "sql", publisher) == "sql"
        await rig.stub.UnloadAdapter(unload, metadata=other)
        assert await adapters_of(rig, other) == {"sql": "sql"}
        await rig.stub.UnloadAdapter(unload, metadata=publisher)
        await assert_absent(rig, "sql", other)


async def test_all_callers_without_keys_own_the_adapters(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT)
    verifier.folders = {"sql"}
    async with (
        running_router(redis_url, adapter_loaders=("*",)) as rig,
        announced(verifier, rig.registry, MODEL.digest),
    ):
        await rig.stub.LoadAdapter(pb.LoadAdapterRequest(name="sql", folder="sql"))
        assert await adapters_of(rig, ()) == {"sql": "sql"}
        assert await generate_with(rig, verifier, "sql", ()) == "sql"


async def test_tenants_may_not_load_adapters_without_permission(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT)
    verifier.folders = {"sql"}
    async with (
        running_router(redis_url) as rig,
        announced(verifier, rig.registry, MODEL.digest),
        outrider.AsyncClient(rig.address) as client,
    ):
        with pytest.raises(Forbidden, match="adapter_loaders"):
            await client.load_adapter("sql", "sql")
        with pytest.raises(Forbidden, match="adapter_loaders"):
            await client.unload_adapter("sql")
