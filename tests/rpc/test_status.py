"""Errors cross the wire and come back as what they were."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from outrider import errors
from outrider.rpc import status
from outrider.rpc.channels import open_channel
from outrider.rpc.server import serving
from outrider.rpc.status import errors_as_status, from_rpc_error
from outrider.v1 import inference_pb2 as pb
from outrider.v1 import inference_pb2_grpc
from outrider.wire.message_bounds import REQUEST_BYTES

Behaviour = Callable[[], None]


class Scripted(inference_pb2_grpc.InferenceServicer):
    """Cancel runs the behaviour under `translated`; Generate yields once before it does."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour

    async def Cancel(self, request, context):
        async with errors_as_status(context):
            self.behaviour()
            return pb.CancelResponse()

    async def Generate(self, request, context):
        async with errors_as_status(context):
            yield pb.GenerateResponse(started=pb.Started(seed=1))
            self.behaviour()

    async def ListModels(self, request, context):
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "bare")


def registering(behaviour: Behaviour) -> Callable[[grpc.aio.Server], Sequence[str]]:
    def register(server: grpc.aio.Server) -> Sequence[str]:
        inference_pb2_grpc.add_InferenceServicer_to_server(Scripted(behaviour), server)
        return ["outrider.v1.Inference"]

    return register


@asynccontextmanager
async def calling(behaviour: Behaviour) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    server = serving("127.0.0.1:0", registering(behaviour), drain_s=0)
    async with server as address, open_channel(address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def failing(error: Exception) -> Behaviour:
    def behaviour() -> None:
        raise error

    return behaviour


async def outcome(behaviour: Behaviour) -> grpc.aio.AioRpcError:
    async with calling(behaviour) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Cancel(pb.CancelRequest(), timeout=5)
    return caught.value


ALL = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.OutriderError) and kind is not errors.OutriderError
]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
async def test_every_error_keeps_its_class_and_text_over_the_wire(
    kind: type[errors.OutriderError],
) -> None:
    sent = (
        kind("top_p", "is 2 – too much") if issubclass(kind, errors.InvalidRequest) else kind("so: it failed – really")
    )
    back = from_rpc_error(await outcome(failing(sent)))
    assert type(back) is kind
    assert str(back) == str(sent)


def test_every_error_class_has_its_own_status_code() -> None:
    assert set(status.CODES) == set(ALL)
    classes = [kind for kind in ALL if kind.__base__ is errors.OutriderError]
    assert len({status.CODES[kind] for kind in classes}) == len(classes)
    assert set(status.BY_CODE.values()) == set(classes)  # a subclass has its base's


async def test_retry_after_and_field_survive_the_wire() -> None:
    overloaded = from_rpc_error(await outcome(failing(errors.Overloaded("full", retry_after=0.25))))
    assert isinstance(overloaded, errors.Overloaded)
    assert overloaded.retry_after == 0.25
    invalid = from_rpc_error(await outcome(failing(errors.InvalidRequest("prompt", "is empty"))))
    assert isinstance(invalid, errors.InvalidRequest)
    assert invalid.field == "prompt"


async def test_a_very_long_message_is_cut_and_still_arrives() -> None:
    back = from_rpc_error(await outcome(failing(errors.NotFound("ü" * 100_000))))
    assert type(back) is errors.NotFound
    assert str(back) == "ü" * 1024


async def test_errors_after_the_first_message_of_a_stream_are_translated_too() -> None:
    async with calling(failing(errors.Superseded("fenced"))) as stub:
        call = stub.Generate(pb.GenerateRequest(), timeout=5)
        assert (await call.read()).started.seed == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert type(from_rpc_error(caught.value)) is errors.Superseded


async def test_a_bug_is_logged_once_and_its_details_stay_on_the_server(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        error = await outcome(failing(ZeroDivisionError("secret")))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(error.details())
    assert [record.name for record in caplog.records] == ["outrider.rpc.status"]
    assert caplog.records[0].exc_info is not None


async def test_a_refused_call_leaves_nothing_to_the_garbage_collector() -> None:
    """What its handler held, such as a request of megabytes, is free at once."""

    class Large:
        pass

    held: list[weakref.ref[Large]] = []

    def behaviour() -> None:
        large = Large()
        held.append(weakref.ref(large))
        raise errors.InvalidRequest("text", "is wrong")

    gc.collect()
    gc.disable()
    try:
        assert (await outcome(behaviour)).code() is grpc.StatusCode.INVALID_ARGUMENT
        async with asyncio.timeout(5):
            while held[0]() is not None:
                await asyncio.sleep(0.01)
    finally:
        gc.enable()


async def test_a_bare_status_falls_back_on_its_code() -> None:
    async with calling(lambda: None) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListModels(pb.ListModelsRequest(), timeout=5)
        assert type(from_rpc_error(caught.value)) is errors.TokenizerMismatch


async def test_an_oversized_message_is_the_callers_mistake() -> None:
    async with calling(lambda: None) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Cancel(pb.CancelRequest(session_id="x" * (REQUEST_BYTES + 1)), timeout=5)
        assert type(from_rpc_error(caught.value)) is errors.InvalidRequest


async def test_cancellation_passes_through_untouched() -> None:
    class Context:
        async def abort(self, *arguments: object) -> None:
            raise AssertionError("a cancelled handler must not abort")

    with pytest.raises(asyncio.CancelledError):
        async with errors_as_status(Context()):  # type: ignore[arg-type]
            raise asyncio.CancelledError
