"""What the router takes for its callers is bounded, and for callers without a key it is next to nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.rpc.authorization import Context, JudgedCalls
from outrider.rpc.channels import open_channel
from outrider.rpc.server import serving
from outrider.store.api_keys import Keys
from outrider.v1 import inference_pb2 as pb
from outrider.v1.inference_pb2_grpc import InferenceServicer, InferenceStub, add_InferenceServicer_to_server
from router.api import auth
from router.api.auth import MAX_FIELDS
from tests.router.fakes import FakeVerifier, announced
from tests.router.rig import MODEL, SCRIPT, Rig, ask, collect, drain, running_router, until
from tests.router.test_tenants import REQUESTS, Metadata, bearer

SERVICE = "/outrider.v1.Inference"
KIB = 2**10


class Unsent:
    """A call whose message is not sent before `send`."""

    def __init__(self, channel: grpc.aio.Channel, method: str, metadata: Metadata = ()) -> None:
        self._message: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._call: Any = channel.stream_stream(method)(self._messages(), metadata=metadata, timeout=20)

    async def _messages(self) -> AsyncIterator[bytes]:
        yield await self._message

    def send(self, message: bytes) -> None:
        self._message.set_result(message)

    async def status(self) -> tuple[grpc.StatusCode, str]:
        try:
            async for _ in self._call:
                pass
        except grpc.aio.AioRpcError:
            pass
        return await self._call.code(), await self._call.details()

    @property
    def ended(self) -> bool:
        return bool(self._call.done())


async def status_of(call: Any) -> grpc.StatusCode:
    try:
        await (drain(call) if hasattr(call, "read") else call)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@asynccontextmanager
async def keyed(redis_url: str, **options: Any) -> AsyncIterator[tuple[Rig, grpc.aio.Channel, Metadata, Metadata]]:
    """A router with keys, a channel to it, and the metadata of two tenants."""
    async with running_router(redis_url, auth="keys", **options) as rig, open_channel(rig.address) as channel:
        keys = Keys(rig.client)
        yield rig, channel, bearer((await keys.add("one"))[0]), bearer((await keys.add("two"))[0])


async def test_no_method_reads_a_message_before_the_tenant_is_known(redis_url: str) -> None:
    async with keyed(redis_url) as (_, channel, mine, _):
        for method, request in REQUESTS.items():
            refused = Unsent(channel, f"{SERVICE}/{method}", bearer("outrider_wrong"))
            assert (await refused.status())[0] is grpc.StatusCode.UNAUTHENTICATED, method
            served = Unsent(channel, f"{SERVICE}/{method}", mine)
            served.send(request.SerializeToString())
            assert (await served.status())[0] is not grpc.StatusCode.UNAUTHENTICATED, method


class Closed(JudgedCalls):
    """Admits nobody until it is told to."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    @asynccontextmanager
    async def admitted(self, method: str, context: Context) -> AsyncIterator[None]:
        await self.open.wait()
        yield


async def test_a_call_that_is_not_judged_yet_may_send_a_few_kilobytes() -> None:
    def register(server: grpc.aio.Server) -> list[str]:
        add_InferenceServicer_to_server(InferenceServicer(), server)
        return []

    judge, block, blocks = Closed(), bytes(64 * KIB), 64
    async with (
        serving("127.0.0.1:0", register, drain_s=0, mutual=False, judge=judge) as address,
        open_channel(address) as channel,
    ):
        call = channel.stream_stream(f"{SERVICE}/Generate")()
        written = 0
        try:
            while written < blocks:
                await asyncio.wait_for(call.write(block), 0.5)
                written += 1
        except TimeoutError:
            pass
        call.cancel()
    assert written < blocks / 4


async def test_a_message_that_does_not_arrive_is_not_waited_for(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "MESSAGE_S", 0.1)
    async with keyed(redis_url) as (_, channel, mine, _):
        code, details = await Unsent(channel, f"{SERVICE}/ListModels", mine).status()
        assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, "message: did not arrive within 0.1 s")


async def test_a_tenants_concurrent_message_reads_are_bounded(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0
    read = auth.read_message

    async def counted(context: Context, within_s: float) -> bytes:
        nonlocal reads
        reads += 1
        return await read(context, within_s)

    monkeypatch.setattr(auth, "read_message", counted)
    monkeypatch.setattr(auth, "MAX_READS", 1)
    async with keyed(redis_url) as (rig, channel, mine, theirs):
        first = Unsent(channel, f"{SERVICE}/ListModels", mine)
        await until(lambda: reads == 1)
        second = asyncio.ensure_future(status_of(rig.stub.ListModels(pb.ListModelsRequest(), metadata=mine)))
        assert await status_of(rig.stub.ListModels(pb.ListModelsRequest(), metadata=theirs)) is grpc.StatusCode.OK
        assert (second.done(), reads) == (False, 2)
        first.send(b"")
        assert (await first.status())[0] is grpc.StatusCode.OK
        assert await second is grpc.StatusCode.OK


async def test_a_message_with_too_many_bytes_or_entries_is_refused_before_parsing(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    decode = pb.GenerateRequest.FromString

    def noted(message: bytes) -> pb.GenerateRequest:
        decoded.append(len(message))
        return decode(message)

    monkeypatch.setattr(pb.GenerateRequest, "FromString", noted)
    empties = pb.GenerateRequest(messages=[pb.Message()] * (MAX_FIELDS + 1))
    async with (
        running_router(redis_url, max_request_bytes=64 * KIB) as rig,
        announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest),
    ):
        for request, code, text in (
            (pb.GenerateRequest(text="x" * 129 * KIB), grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"),
            (empties, grpc.StatusCode.INVALID_ARGUMENT, f"at most {MAX_FIELDS} entries"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=text) as refused:
                await drain(rig.stub.Generate(request))
            assert refused.value.code() is code
        assert decoded == []
        await collect(rig.stub.Generate(ask(max_tokens=1)))
        assert len(decoded) == 1
        with pytest.raises(grpc.aio.AioRpcError, match="must have at most 65536"):
            await rig.stub.Cancel(pb.CancelRequest(session_id="x" * 65 * KIB))


async def test_too_many_token_ids_are_refused_before_they_are_copied(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def admitted(*_: object) -> None:
        raise AssertionError("it waits for a place")

    async with running_router(redis_url) as rig, announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest):
        await collect(rig.stub.Generate(ask(max_tokens=1)))  # from now on its verifier is known
        monkeypatch.setattr("router.scheduling.admission.Admission.slot", admitted)
        with pytest.raises(grpc.aio.AioRpcError, match="prompt: has 9999 tokens, must have at most"):
            await drain(rig.stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 9999))))


async def test_calls_beyond_their_number_are_refused(redis_url: str) -> None:
    async with running_router(redis_url, max_calls=1) as rig, open_channel(rig.address) as channel:
        holding = Unsent(channel, f"{SERVICE}/ListModels")
        while await status_of(rig.stub.ListModels(pb.ListModelsRequest())) is grpc.StatusCode.OK:
            if holding.ended:  # it came while the other one ran
                holding = Unsent(channel, f"{SERVICE}/ListModels")
        assert await status_of(rig.stub.ListModels(pb.ListModelsRequest())) is grpc.StatusCode.RESOURCE_EXHAUSTED
        holding.send(b"")
        assert (await holding.status())[0] is grpc.StatusCode.OK
        while await status_of(rig.stub.ListModels(pb.ListModelsRequest())) is not grpc.StatusCode.OK:
            await asyncio.sleep(0.01)


async def test_connections_beyond_their_number_are_closed(redis_url: str) -> None:
    async with running_router(redis_url, max_connections=1) as rig:
        assert await status_of(rig.stub.ListModels(pb.ListModelsRequest())) is grpc.StatusCode.OK
        async with open_channel(rig.address) as second:
            assert await status_of(InferenceStub(second).ListModels(pb.ListModelsRequest())) is (
                grpc.StatusCode.UNAVAILABLE
            )
        assert await status_of(rig.stub.ListModels(pb.ListModelsRequest())) is grpc.StatusCode.OK


async def test_health_without_a_key_has_few_calls_and_small_messages(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "MAX_HEALTH_CALLS", 1)
    async with keyed(redis_url) as (_, channel, _, _):
        health = health_pb2_grpc.HealthStub(channel)
        long = health_pb2.HealthCheckRequest(service="x" * 2 * KIB)
        assert await status_of(health.Check(long)) is grpc.StatusCode.INVALID_ARGUMENT
        async with aclosing(_answers(health.Watch(health_pb2.HealthCheckRequest()))) as watching:
            assert (await anext(watching)).status == health_pb2.HealthCheckResponse.SERVING
            assert await status_of(health.Check(health_pb2.HealthCheckRequest())) is grpc.StatusCode.RESOURCE_EXHAUSTED
        while await status_of(health.Check(health_pb2.HealthCheckRequest())) is not grpc.StatusCode.OK:
            await asyncio.sleep(0.01)


async def _answers(call: Any) -> AsyncIterator[Any]:
    try:
        async for answer in call:
            yield answer
    finally:
        call.cancel()


async def test_reflection_without_a_key_has_few_calls_which_end(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "MAX_REFLECTION_CALLS", 1)
    monkeypatch.setattr(auth, "REFLECTION_S", 0.3)
    async with keyed(redis_url) as (_, channel, _, _):
        path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        first, second = Unsent(channel, path), Unsent(channel, path)
        codes = [(await call.status())[0].name for call in (first, second)]
        assert sorted(codes) == ["DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"]
        monkeypatch.setattr(auth, "REFLECTION_S", 10.0)
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        listing = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="*")]))
        assert (await listing.read()).list_services_response.service
