"""Answer streams: events of many calls in one message, each call within its own window, and no call's end lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.errors import InvalidRequest, OutriderError, Overloaded
from outrider.rpc.status import from_rpc_error
from outrider.v1 import inference_pb2 as pb
from router.api import answer_streams
from router.api.answer_streams import MAX_HANDLES, MAX_STREAMS, MESSAGE_BYTES, WINDOW_BYTES
from router.sessions import outbox
from tests.router import fakes
from tests.router.rig import Rig, ask, collect, drain, script, scripted_router, until

NAME = b"sixteen bytes it"
STREAM = "/outrider.v1.Inference/Answers"


@pytest.fixture(autouse=True)
def long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "CONTEXT", 200_000)


class AnswersCall:
    """A client's Answers call, which sorts what it is sent by handle."""

    def __init__(self, rig: Rig, name: bytes = NAME) -> None:
        self.call = rig.stub.Answers()
        self.name = name
        self.events: dict[int, list[pb.GenerateResponse]] = {}
        self.together = 0  # the most calls with events in one message

    async def open(self) -> None:
        await self.send(stream=self.name)
        await asyncio.sleep(0.05)

    async def send(self, **fields: Any) -> None:
        await self.call.write(pb.AnswersRequest(**fields))

    async def read(self) -> None:
        async for message in self.call:
            for answer in message.answers:
                self.events.setdefault(answer.handle, []).append(answer.response)
            self.together = max(self.together, len({answer.handle for answer in message.answers}))

    def taken(self, handle: int) -> int:
        return sum(event.ByteSize() for event in self.events.get(handle, ()))

    def tokens(self, handle: int) -> list[int]:
        return [token for event in self.events.get(handle, ()) for token in event.chunk.token_ids]

    def finished(self, handle: int) -> bool:
        return bool(self.events.get(handle)) and self.events[handle][-1].HasField("finished")

    async def error(self) -> OutriderError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.read()
        return from_rpc_error(caught.value)


@asynccontextmanager
async def opened(rig: Rig) -> AsyncIterator[AnswersCall]:
    answers = AnswersCall(rig)
    await answers.open()
    reading = asyncio.create_task(answers.read())
    yield answers
    answers.call.cancel()
    await asyncio.gather(reading, return_exceptions=True)


def routed(handle: int, name: bytes = NAME, **sampling: Any) -> pb.GenerateRequest:
    request = ask(**sampling)
    request.route.CopyFrom(pb.AnswerRoute(stream=name, handle=handle))
    return request


async def test_events_of_several_calls_share_a_message_and_each_answer_is_whole(redis_url: str) -> None:
    async with scripted_router(redis_url) as rig, opened(rig) as answers:
        calls = [rig.stub.Generate(routed(handle, max_tokens=40)) for handle in range(1, 9)]
        assert [await drain(call) for call in calls] == [[]] * 8  # and all end well
        await until(lambda: all(map(answers.finished, range(1, 9))))
        for handle in range(1, 9):
            kinds = [event.WhichOneof("event") for event in answers.events[handle]]
            assert kinds == ["started", *["chunk"] * (len(kinds) - 2), "finished"]
            assert answers.tokens(handle) == script(40)
        assert answers.together > 1


async def test_a_resumed_generation_uses_the_answer_stream_too(redis_url: str) -> None:
    async with scripted_router(redis_url) as rig, opened(rig) as answers:
        started, chunks, _ = await collect(rig.stub.Generate(ask(max_tokens=20)))
        route = pb.AnswerRoute(stream=NAME, handle=7)
        request = pb.ResumeRequest(
            session_id=started.session_id,
            next_position=chunks[-1].next_position - 5,
            text_offset=sum(len(chunk.text) for chunk in chunks),
            route=route,
        )
        assert await drain(rig.stub.Resume(request)) == []
        await until(lambda: answers.finished(7))
        assert answers.tokens(7) == script(20)[15:]


async def test_a_call_that_is_not_taken_waits_alone_within_its_window(redis_url: str) -> None:
    async with scripted_router(redis_url, stride=16) as rig, opened(rig) as answers:
        slow = rig.stub.Generate(routed(1, max_tokens=20_000, logprobs=20))
        fast = rig.stub.Generate(routed(2, max_tokens=4_000, logprobs=20))

        async def take() -> None:
            while not answers.finished(2):
                await answers.send(handles=[2], taken=[answers.taken(2)])
                await asyncio.sleep(0.01)

        async with asyncio.timeout(30):
            await take()
        assert answers.tokens(2) == script(4_000)
        stopped_at = answers.taken(1)
        largest = max(event.ByteSize() for event in answers.events[1])
        assert stopped_at <= WINDOW_BYTES + largest
        await answers.send(handles=[1], taken=[stopped_at])
        await until(lambda: answers.taken(1) > stopped_at)
        slow.cancel()
        assert await drain(fast) == []


async def test_a_client_that_takes_nothing_loses_its_slot_and_resumes(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "SLOW_CLIENT_S", 0.5)
    async with scripted_router(redis_url, stride=16) as rig, opened(rig) as answers:
        call = rig.stub.Generate(routed(1, max_tokens=20_000, logprobs=20))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await drain(call)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "did not read" in str(caught.value.details())
        assert answers.tokens(1) == script(len(answers.tokens(1)))


async def test_the_end_of_a_stream_ends_its_calls(redis_url: str) -> None:
    async with scripted_router(redis_url, pace_s=0.01) as rig, opened(rig) as answers:
        call = rig.stub.Generate(routed(1, max_tokens=2_000))
        alone = rig.stub.Generate(ask(max_tokens=60))
        await until(lambda: len(answers.tokens(1)) > 5)
        answers.call.cancel()
        async with asyncio.timeout(3):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await drain(call)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        _, chunks, _ = await collect(alone)
        assert [token for chunk in chunks for token in chunk.token_ids] == script(60)


@pytest.mark.parametrize(
    "route",
    [(b"another name....", 1), (NAME, 0), (b"short", 1), (NAME, 5)],
    ids=["unknown", "handle 0", "no name", "handle in use"],
)
async def test_a_call_without_its_answer_stream_is_sent_its_events_itself(
    redis_url: str, route: tuple[bytes, int]
) -> None:
    async with scripted_router(redis_url, pace_s=0.005) as rig, opened(rig) as answers:
        holder = rig.stub.Generate(routed(5, max_tokens=2_000))
        await until(lambda: bool(answers.tokens(5)))
        _, chunks, _ = await collect(rig.stub.Generate(routed(route[1], route[0], max_tokens=20)))
        assert [token for chunk in chunks for token in chunk.token_ids] == script(20)
        holder.cancel()


async def test_a_broken_call_frees_its_handle_and_stops_its_events(redis_url: str) -> None:
    async with scripted_router(redis_url, pace_s=0.005) as rig, opened(rig) as answers:
        call = rig.stub.Generate(routed(1, max_tokens=2_000))
        await until(lambda: len(answers.tokens(1)) > 5)
        call.cancel()
        await asyncio.sleep(0.2)
        before = len(answers.events[1])
        assert await drain(rig.stub.Generate(routed(1, max_tokens=20))) == []
        await until(lambda: answers.finished(1))
        kinds = [event.WhichOneof("event") for event in answers.events[1][before:]]
        assert kinds[0] == "started"
        assert sum(len(event.chunk.token_ids) for event in answers.events[1][before:]) == 20


MALFORMED: list[tuple[dict[str, Any], dict[str, Any], str]] = [  # first and second message, the field of the error
    ({"stream": b"short"}, {}, "stream"),
    ({"handles": [1], "taken": [1]}, {}, "stream"),
    ({"stream": NAME}, {"handles": [1, 2], "taken": [1]}, "taken"),
    ({"stream": NAME}, {"handles": [1], "taken": [10**9]}, "taken"),
    ({"stream": NAME}, {"handles": [1] * (MAX_HANDLES + 1), "taken": [0] * (MAX_HANDLES + 1)}, "handles"),
    ({"stream": NAME + bytes(2**17)}, {}, "message"),
]


async def test_a_malformed_message_ends_its_stream_with_the_field(redis_url: str) -> None:
    async with scripted_router(redis_url, pace_s=0.01) as rig:
        for first, then, field in MALFORMED:
            answers = AnswersCall(rig)
            await answers.send(**first)
            call = rig.stub.Generate(routed(1, max_tokens=2_000))
            if then:
                await asyncio.sleep(0.2)  # until the generation has its place on the stream
                await answers.send(**then)
            error = await answers.error()
            assert isinstance(error, InvalidRequest)
            assert error.field == field
            call.cancel()
        assert len((await collect(rig.stub.Generate(ask(max_tokens=5))))[1]) > 0


async def test_bytes_that_do_not_parse_end_the_stream(redis_url: str) -> None:
    async with scripted_router(redis_url) as rig, grpc.aio.insecure_channel(rig.address) as channel:
        call: Any = channel.stream_stream(STREAM)()
        await call.write(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert isinstance(from_rpc_error(caught.value), InvalidRequest)


async def test_a_stream_name_is_unique_and_a_tenants_streams_are_bounded(redis_url: str) -> None:
    async with scripted_router(redis_url) as rig, opened(rig):
        second = AnswersCall(rig)
        await second.send(stream=NAME)
        error = await second.error()
        assert isinstance(error, InvalidRequest)
        assert error.field == "stream"
        others = [AnswersCall(rig, number.to_bytes(16)) for number in range(MAX_STREAMS)]
        for other in others:
            await other.send(stream=other.name)
        ends = [asyncio.create_task(other.error()) for other in others]
        refused, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)  # the one that arrived last
        assert [type(end.result()) for end in refused] == [Overloaded]
        for other, end in zip(others, ends, strict=True):
            other.call.cancel()
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)


async def test_credit_for_calls_that_are_over_is_ignored(redis_url: str) -> None:
    async with scripted_router(redis_url) as rig, opened(rig) as answers:
        assert await drain(rig.stub.Generate(routed(1, max_tokens=20))) == []
        await until(lambda: answers.finished(1))
        await answers.send(handles=[1, 99], taken=[answers.taken(1), 10**9])
        assert await drain(rig.stub.Generate(routed(2, max_tokens=20))) == []
        await until(lambda: answers.finished(2))


async def test_a_flood_of_credit_is_read_slowly(redis_url: str) -> None:
    async with scripted_router(redis_url, pace_s=0.01) as rig, opened(rig) as answers:
        call = rig.stub.Generate(routed(1, max_tokens=100_000))
        await until(lambda: bool(answers.tokens(1)))
        sent = 0
        loop = asyncio.get_running_loop()
        began = loop.time()
        while loop.time() < began + 0.5:
            await asyncio.wait({writing := asyncio.ensure_future(answers.send(handles=[1], taken=[0]))}, timeout=0.5)
            if not writing.done():
                break  # gRPC's flow control holds the flood back
            sent += 1
        before = len(answers.tokens(1))
        await asyncio.sleep(0.5)
        assert len(answers.tokens(1)) > before
        call.cancel()


@asynccontextmanager
async def sending(
    stream: answer_streams.AnswerQueue, *, stuck: bool = False
) -> AsyncIterator[list[pb.AnswersResponse]]:
    """The messages of a stream that runs; `stuck`: its client does not read the first one."""
    messages: list[pb.AnswersResponse] = []

    async def no_requests() -> AsyncIterator[pb.AnswersRequest]:
        await asyncio.Event().wait()
        yield pb.AnswersRequest()

    async def send(message: pb.AnswersResponse) -> None:
        messages.append(message)
        if stuck:
            await asyncio.Event().wait()

    running = asyncio.create_task(stream.run(no_requests(), send))
    try:
        yield messages
    finally:
        running.cancel()
        await asyncio.wait({running})


async def test_a_message_is_full_at_a_mebibyte_and_leaves_no_event_behind() -> None:
    stream = answer_streams.AnswerQueue()
    lanes = [stream.open(handle) for handle in (1, 2, 3)]
    event = pb.GenerateResponse(chunk=pb.Chunk(text="x" * 100_000))
    put: list[int] = []
    for number in range(30):
        lane = lanes[number % 3]
        assert lane is not None
        stream.put(lane, event, event.ByteSize())
        put.append(lane.handle)
    assert lanes[2] is not None
    lanes[2].close()
    expected = [handle for handle in put if handle != 3]
    async with sending(stream) as messages:
        await until(lambda: sum(len(message.answers) for message in messages) == len(expected))
    assert [answer.handle for message in messages for answer in message.answers] == expected
    assert len(messages) >= 2
    assert max(message.ByteSize() for message in messages) < MESSAGE_BYTES + 2 * event.ByteSize()


async def test_a_tenant_cannot_name_a_stream_of_another() -> None:
    streams = answer_streams.AnswerStreams()
    ending = asyncio.Event()

    async def requests() -> AsyncIterator[pb.AnswersRequest]:
        yield pb.AnswersRequest(stream=NAME)
        await ending.wait()

    context: Any = CountingContext()
    serving = asyncio.create_task(streams.serve("one", requests(), context))
    await asyncio.sleep(0.01)
    for tenant, written in (("another", 1), ("one", 0)):
        context.calls = 0
        async with streams.writer(tenant, (NAME, 1), context) as writer:
            await writer.write(pb.GenerateResponse())
            assert context.calls == written
    ending.set()
    await serving


class CountingContext:
    """A call's context that counts the messages which are written on the call."""

    calls = 0

    async def write(self, message: Any) -> None:
        self.calls += isinstance(message, pb.GenerateResponse)


async def test_a_lane_waits_for_credit_and_fails_with_its_stream() -> None:
    stream = answer_streams.AnswerQueue()
    lane = stream.open(1)
    assert lane is not None
    event = pb.GenerateResponse(chunk=pb.Chunk(text="x" * WINDOW_BYTES))
    await lane.write(event)
    waiting = asyncio.create_task(lane.write(event))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    async with sending(stream, stuck=True) as messages:
        await until(lambda: bool(messages))
        with pytest.raises(InvalidRequest):
            lane.acknowledge(event.ByteSize() + 1)
        lane.acknowledge(event.ByteSize())
        await waiting
        flushing = asyncio.create_task(lane.flush())
        await asyncio.sleep(0.01)
        assert not flushing.done()
    failing: Callable[[], Any] = flushing.result
    await asyncio.wait({flushing})
    with pytest.raises(OutriderError, match="resume"):
        failing()
