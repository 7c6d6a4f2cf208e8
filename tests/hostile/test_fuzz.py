"""Whatever a peer sends: refused with a status or a reason, never an uncaught error, never unbounded memory."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import outrider
from drafter_svc.server import run as run_drafter
from outrider.core.session.digest import EMPTY, extend
from outrider.engine.checkpoints.checkpoint import read_tokenizer_digest
from outrider.errors import OutriderError
from outrider.rpc.channels import open_channel
from outrider.rpc.server import serving as serving_grpc
from outrider.rpc.status import CLASS_KEY, errors_as_status
from outrider.store.registry import Worker
from outrider.v1 import drafter_pb2, inference_pb2, types_pb2, verifier_pb2
from outrider.v1.drafter_pb2_grpc import (
    DrafterStub,
    TreeSinkServicer,
    TreeSinkStub,
    add_TreeSinkServicer_to_server,
)
from outrider.v1.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from outrider.v1.verifier_pb2_grpc import VerifierServicer, VerifierStub, add_VerifierServicer_to_server
from outrider.wire.tickets import Permit
from tests.e2e.mini_router import listed_signer
from tests.engine.small_checkpoints import make_checkpoint
from tests.engine.taught import random_heads
from tests.hostile import frames
from tests.hostile.rig import (
    PROMPT,
    VOCABULARY,
    drafter_config,
    resident_bytes,
    serving,
    start,
    verifier_config,
    watched,
)
from tests.router.fakes import FakeVerifier, announced
from tests.router.rig import MODEL, SCRIPT, Rig, running_router
from verifier_svc.server import run as run_verifier

BATCH = 40  # frames sent at a time, on one stream
RUN = 5_000  # frames of one run of hypothesis
GROWTH = 150 * 2**20  # bytes that a long run may add
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


OUTCOMES = REFUSALS | {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL}  # of lying peers


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


def batches(kind: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(kind, min_size=BATCH, max_size=BATCH)


def fuzz(kind: st.SearchStrategy[Any], count: int) -> Any:
    """Runs an async function over about `count` generated frames, `BATCH` at a time.

    In several runs: within one, hypothesis remembers all that it ever drew.
    """
    everything = settings(
        max_examples=max(1, min(count, RUN) // BATCH),
        database=None,
        suppress_health_check=list(HealthCheck),
    )

    def decorate(check: Any) -> Any:
        loop = asyncio.get_running_loop()

        def run() -> None:
            for number in range(max(1, count // RUN)):

                @seed(number)
                @everything
                @given(batches(kind))
                def some(batch: list[Any]) -> None:
                    asyncio.run_coroutine_threadsafe(check(batch), loop).result(60)

                some()
                gc.collect()  # what hypothesis leaves in cycles is not ours

        return asyncio.to_thread(run)

    return decorate


COUNTS = [
    pytest.param(250, id="250"),
    pytest.param(250_000, id="250000", marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
]


@pytest.mark.parametrize("count", COUNTS)
async def test_fuzzed_frames_of_a_drafter_harm_no_session(checkpoint: Path, redis_url: str, count: int) -> None:
    async with AsyncExitStack() as stack:
        channel = await verifier_of(stack, checkpoint, redis_url)
        async with decoding(channel, checkpoint) as committed:
            described = await VerifierStub(channel).Describe(types_pb2.DescribeRequest())
            digests = [extend(EMPTY, committed[:length]) for length in range(1, len(committed) + 1)]
            frames.TRUE_DIGESTS[:] = digests
            permit = Permit("s", "", "d", described.worker_id, 1)
            good = (await listed_signer(redis_url)).sign(permit, valid_s=7200)
            hello = drafter_pb2.Hello(
                drafter_id="d", tokenizer_digest=described.tokenizer_digest, vocabulary=VOCABULARY
            )
            before = resident_bytes()

            @fuzz(frames.draft_frames(st.one_of(st.just(good), st.binary(max_size=40))), count)
            async def run(batch: list[drafter_pb2.DraftUp]) -> None:
                # A second hello ends the stream once all before it was dealt with.
                sent = [drafter_pb2.DraftUp(hello=hello), *batch, drafter_pb2.DraftUp(hello=hello)]
                status = await converse(TreeSinkStub(channel).Draft(aiter_of(sent)))
                assert status in REFUSALS

            await run
            assert resident_bytes() - before < GROWTH
            after = await VerifierStub(channel).Describe(types_pb2.DescribeRequest())
            assert after.refused_frames > described.refused_frames
            assert (after.sessions, after.drafters) == (1, 0)
            assert after.tasks <= described.tasks + 3


async def verifier_of(stack: AsyncExitStack, checkpoint: Path, redis_url: str) -> grpc.aio.Channel:
    """A channel to a verifier in this process, whose faults fail the test."""
    await stack.enter_async_context(watched())
    address = await stack.enter_async_context(serving(run_verifier, verifier_config(checkpoint), redis_url))
    return await stack.enter_async_context(open_channel(address))


@asynccontextmanager
async def decoding(channel: grpc.aio.Channel, checkpoint: Path) -> AsyncIterator[list[int]]:
    """A session "s" that waits at its window; gives its tokens."""
    requests: asyncio.Queue[verifier_pb2.DecodeRequest | None] = asyncio.Queue()
    requests.put_nowait(verifier_pb2.DecodeRequest(start=start(checkpoint)))
    call = VerifierStub(channel).Decode(queued(requests))
    committed = list(PROMPT)
    async for response in call:
        for commit in response.commits:
            committed += commit.tokens
        if len(committed) >= len(PROMPT) + 2:
            break
    yield committed
    requests.put_nowait(None)
    call.cancel()


async def queued(queue: asyncio.Queue[verifier_pb2.DecodeRequest | None]) -> AsyncIterator[verifier_pb2.DecodeRequest]:
    """A router's commands, and a sign of life where there is none."""
    while True:
        try:
            async with asyncio.timeout(5):
                item = await queue.get()
        except TimeoutError:
            item = verifier_pb2.DecodeRequest()
        if item is None:
            return
        yield item


async def aiter_of(items: Sequence[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


async def converse(call: Any) -> grpc.StatusCode:
    """Reads a call to its end; gives its status."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        ours = CLASS_KEY in dict(error.trailing_metadata() or ())
        if error.code() == grpc.StatusCode.INTERNAL and not ours:
            return grpc.StatusCode.ABORTED  # gRPC's own word for a write of ours that met the end of the call
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("count", COUNTS)
async def test_fuzzed_commands_of_a_router_harm_no_session(checkpoint: Path, redis_url: str, count: int) -> None:
    broken = st.fixed_dictionaries(
        {},
        optional={
            "session_id": frames.names,
            "epoch": frames.huge,
            "model": frames.names,
            "tokenizer_digest": st.binary(max_size=3),
            "tokens": st.lists(frames.tokens, max_size=8),
            "digest": frames.huge,
            "answer_position": frames.huge,
            "contract": frames.contracts,
            "plan": frames.plans,
            "window": frames.unsigned,
            "lease_ms": frames.unsigned,
            "tenant": frames.names,
            "handle": frames.handles,
        },
    )
    starts = broken.map(lambda changes: verifier_pb2.DecodeRequest(start=start(checkpoint, **changes)))
    async with AsyncExitStack() as stack:
        channel = await verifier_of(stack, checkpoint, redis_url)
        before = resident_bytes()

        @fuzz(st.one_of(starts, frames.decode_commands), count)
        async def run(batch: list[verifier_pb2.DecodeRequest]) -> None:
            calls = [VerifierStub(channel).Decode(aiter_of(batch[first:])) for first in range(0, BATCH, 8)]
            statuses = await asyncio.gather(*map(converse, calls))
            assert set(statuses) <= REFUSALS | {grpc.StatusCode.OK}, statuses

        await run
        assert resident_bytes() - before < GROWTH
        async with asyncio.timeout(5):
            while (await VerifierStub(channel).Describe(types_pb2.DescribeRequest())).sessions:
                await asyncio.sleep(0.01)
        async with decoding(channel, checkpoint) as committed:
            assert len(committed) >= len(PROMPT) + 2


class Liar(TreeSinkServicer):
    """An upstream that sends the frames of its script, and then ends the stream."""

    def __init__(self) -> None:
        self.script: list[drafter_pb2.DraftDown] = []
        self.streams = 0

    async def Draft(self, requests: AsyncIterator[drafter_pb2.DraftUp], context: Any) -> None:
        async for frame in requests:
            if frame.WhichOneof("frame") == "subscribe":
                break
        script, self.script = self.script, []
        for frame in script:
            await context.write(frame)
        self.streams += bool(script)


@pytest.mark.parametrize("headed", [False, True])
@pytest.mark.parametrize("count", COUNTS)
async def test_fuzzed_frames_of_an_upstream_harm_no_session(
    checkpoint: Path, redis_url: str, count: int, headed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a drafter with a model, and of one with heads, which wants features."""
    from drafter_svc.upstreams import upstream

    monkeypatch.setattr(upstream, "RETRY_S", 0.001)
    liar = Liar()

    def register(server: grpc.aio.Server) -> list[str]:
        add_TreeSinkServicer_to_server(liar, server)
        return []

    frames.TRUE_DIGESTS[:] = [extend(EMPTY, PROMPT[:length]) for length in range(len(PROMPT) + 1)]
    config, width = drafter_config(checkpoint), 0
    if headed:
        width = random_heads("eagle-3", checkpoint, tmp_path)[0].width
        config = config.model_copy(update={"heads": tmp_path})
    async with (
        watched(),
        serving(run_drafter, config, redis_url) as address,
        serving_grpc("127.0.0.1:0", register, drain_s=0) as lies,
        open_channel(address) as channel,
    ):
        stub = DrafterStub(channel)
        numbers = iter(range(1, 10**9))
        before = resident_bytes()

        @fuzz(frames.upstream_frames(1, width), count)
        async def run(batch: list[drafter_pb2.DraftDown]) -> None:
            number = next(numbers)
            for frame in batch:  # the drafter numbers its subscriptions on and on
                kind = frame.WhichOneof("frame")
                if kind in ("snapshot", "commit", "closed", "hints") and getattr(frame, kind).attachment == 1:
                    getattr(frame, kind).attachment = number
            streams = liar.streams
            liar.script = batch
            await stub.Attach(drafter_pb2.AttachRequest(session_id=f"s{number}", epoch=1, upstream=lies))
            async with asyncio.timeout(20):
                while liar.streams == streams:
                    await asyncio.sleep(0.001)
            await stub.Detach(drafter_pb2.DetachRequest(session_id=f"s{number}", epoch=1))

        await run
        assert resident_bytes() - before < GROWTH
        async with asyncio.timeout(5):
            while (await stub.Describe(types_pb2.DescribeRequest())).sessions:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def fuzzed_router(redis_url: str) -> AsyncIterator[Rig]:
    """A router with a verifier, which has grown little and has logged no error at the end."""
    async with (
        watched(),
        running_router(redis_url) as rig,
        announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest) as worker,
    ):
        await rig.registry.announce(worker, ttl_s=3600)
        before = resident_bytes()
        yield rig
        assert resident_bytes() - before < GROWTH


@pytest.mark.parametrize("count", COUNTS)
async def test_fuzzed_requests_of_a_client_harm_no_session(redis_url: str, count: int) -> None:
    async with fuzzed_router(redis_url) as rig:

        @fuzz(st.one_of(frames.generate_requests, frames.resume_requests), count)
        async def run(batch: list[Any]) -> None:
            for request in batch:
                method = rig.stub.Resume if hasattr(request, "next_position") else rig.stub.Generate
                status = await converse(method(request))
                assert status in REFUSALS | {grpc.StatusCode.OK}, (status, request)

        await run


@pytest.mark.parametrize("count", COUNTS)
async def test_fuzzed_reports_of_a_client_harm_no_session(redis_url: str, count: int) -> None:
    async with fuzzed_router(redis_url) as rig:
        name = b"a stream's name."
        request = inference_pb2.GenerateRequest(text="a", route=inference_pb2.AnswerRoute(stream=name, handle=1))

        @fuzz(frames.answers_requests, count)
        async def run(batch: list[inference_pb2.AnswersRequest]) -> None:
            for first in range(0, BATCH, 8):
                answers = rig.stub.Answers(iter([inference_pb2.AnswersRequest(stream=name), *batch[first : first + 8]]))
                one, other = await asyncio.gather(converse(rig.stub.Generate(request)), converse(answers))
                assert one in REFUSALS | {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
                assert other in REFUSALS | {grpc.StatusCode.OK}

        await run


class LyingVerifier(VerifierServicer):
    """Begins as it should, then sends a response of its script, and ends the call."""

    def __init__(self) -> None:
        self.script: list[verifier_pb2.DecodeResponse] = []

    async def Decode(self, requests: AsyncIterator[verifier_pb2.DecodeRequest], context: Any) -> None:
        async with errors_as_status(context):  # a router may leave before it has heard all lies
            first = await anext(requests, None)
            if first is None or not self.script:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no more lies")
            started = verifier_pb2.DecodeStarted(handle=first.start.handle)
            await context.write(verifier_pb2.DecodeResponse(started=[started]))
            await context.write(self.script.pop())


@pytest.mark.parametrize("count", COUNTS)
async def test_fuzzed_commits_of_a_verifier_harm_no_session(
    redis_url: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    liar = LyingVerifier()
    monkeypatch.setattr("router.scheduling.workers._SUSPECTED_S", 0.0)

    def register(server: grpc.aio.Server) -> list[str]:
        add_VerifierServicer_to_server(liar, server)
        return []

    async with (
        watched(),
        running_router(redis_url, queue_s=0.01) as rig,
        serving_grpc("127.0.0.1:0", register, drain_s=0) as lies,
    ):
        worker = Worker("v1", "verifier", lies, "target", MODEL.digest, 4096, 64, 8, 0, 1)
        await rig.registry.announce(worker, ttl_s=3600)
        before = resident_bytes()

        @fuzz(frames.decode_responses, min(count, 40_000))
        async def run(batch: list[verifier_pb2.DecodeResponse]) -> None:
            for response in batch:
                liar.script = [response]
                call = rig.stub.Generate(inference_pb2.GenerateRequest(text="a"), timeout=20)
                status = await converse(call)
                assert status in OUTCOMES, (status, response)

        await run
        assert resident_bytes() - before < GROWTH


class LyingRouter(InferenceServicer):
    """Sends the responses of its script, and aborts the call."""

    def __init__(self) -> None:
        self.script: list[inference_pb2.GenerateResponse] = []

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        async with errors_as_status(context):  # a client may leave before it has heard all lies
            for response in self.script:
                await context.write(response)
            await context.abort(grpc.StatusCode.ABORTED, "no more lies")  # the SDK does not try that again

    async def Answers(self, requests: Any, context: Any) -> None:
        async with errors_as_status(context):
            handles = iter(range(2 * len(self.script)))
            for response in self.script:  # for calls that are there, and for others
                answer = inference_pb2.Answer(handle=next(handles) % 4, response=response)
                await context.write(inference_pb2.AnswersResponse(answers=[answer]))

    Resume = Generate  # type: ignore[assignment]


@pytest.mark.parametrize("count", COUNTS)
async def test_fuzzed_events_of_a_router_give_answers_or_typed_errors(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.client._stream.FIRST_PAUSE_S", 0.001)
    liar = LyingRouter()

    def register(server: grpc.aio.Server) -> list[str]:
        add_InferenceServicer_to_server(liar, server)
        return []

    async with (
        watched(),
        serving_grpc("127.0.0.1:0", register, drain_s=0) as lies,
        outrider.AsyncClient(lies) as client,
    ):
        before = resident_bytes()

        @fuzz(frames.generate_responses, count)
        async def run(batch: list[inference_pb2.GenerateResponse]) -> None:
            for first in range(0, BATCH, 4):
                liar.script = batch[first : first + 4]
                both = [client.generate("a", timeout=20) for _ in range(2)]  # the second one opens a stream of answers
                for result in await asyncio.gather(*both, return_exceptions=True):
                    assert isinstance(result, OutriderError | outrider.Generation), result

        await run
        assert resident_bytes() - before < GROWTH


async def test_bytes_that_are_no_message_end_their_stream_alone(checkpoint: Path, redis_url: str) -> None:
    async with AsyncExitStack() as stack:
        channel = await verifier_of(stack, checkpoint, redis_url)
        async with decoding(channel, checkpoint):
            raw = channel.stream_stream(
                "/outrider.v1.TreeSink/Draft", request_serializer=bytes, response_deserializer=bytes
            )
            for blob in (os.urandom(100), b"\xff" * 50, b"\x0a\xff\xff\xff\xff\x0f"):
                assert await converse(raw(aiter_of([blob]))) == grpc.StatusCode.INVALID_ARGUMENT
            described = await VerifierStub(channel).Describe(types_pb2.DescribeRequest())
            assert (described.sessions, described.drafters) == (1, 0)
            assert described.tokenizer_digest == read_tokenizer_digest(checkpoint)
