"""A stream outlives its calls: whatever breaks, every token and character comes exactly once, or the error is typed."""

from __future__ import annotations

import asyncio
import itertools
import math
import socket
import time
from collections.abc import Callable

import grpc
import pytest

import outrider
from bench.faults import FaultProxy
from outrider import errors
from outrider.client import _router, _stream
from outrider.client._received import ReceivedAnswer
from outrider.v1 import inference_pb2 as pb
from tests.client.conftest import WORDS, Fault, ScriptedRouter, served

TEXT = "".join(WORDS)
EVENTS = len(WORDS) + 2  # of an unbroken call: Started, a chunk for each word, Finished


def assert_whole(result: outrider.Generation, chunks: list[outrider.Chunk] | None = None) -> None:
    """Nothing is missing and nothing came twice; gaps are the router's where they are known."""
    assert (result.text, result.token_ids) == (TEXT, (1, 2, 3, 4, 5))
    assert all(math.isnan(gap) or gap == number / 4 for number, gap in enumerate(result.gaps, 1))
    assert len(result.gaps) == 5
    if chunks is not None:
        assert "".join(chunk.text for chunk in chunks) == TEXT
        assert [token for chunk in chunks for token in chunk.token_ids] == [1, 2, 3, 4, 5]
        assert chunks[-1].text_offset == len(TEXT)


@pytest.fixture(autouse=True)
def quickly(short_pauses: None) -> None:
    """Every test here, but those that measure pauses."""


@pytest.mark.parametrize("after", range(EVENTS))
@pytest.mark.parametrize(
    "error",
    [
        None,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        errors.Unavailable("no verifier right now"),
    ],
    ids=str,
)
async def test_a_call_that_breaks_anywhere_is_continued_by_another(
    router: ScriptedRouter, error: errors.OutriderError | grpc.StatusCode | None, after: int
) -> None:
    router.faults = iter([Fault(after, error)])
    async with outrider.AsyncClient(router.address) as client:
        chunks = await read(stream := client.stream("hello", seed=7, logprobs=1, timeout=5))
    assert_whole(stream.result, chunks)
    assert [entry.logprob for entry in stream.result.logprobs] == [0.0, -0.25, -0.5, -0.75, -1.0]
    assert (stream.result.seed, stream.result.session_id, stream.result.resumes) == (7, "session-1", 1)
    assert (len(router.requests), len(router.resumes)) == ((1, 1) if after else (2, 0))
    assert router.cancelled_sessions == []


@pytest.mark.parametrize("after", [0, 3])
async def test_a_generation_cancelled_by_another_caller_is_not_requested_again(
    router: ScriptedRouter, after: int
) -> None:
    router.faults = iter([Fault(after, errors.Cancelled("the generation was cancelled while it waited for a slot"))])
    async with outrider.AsyncClient(router.address) as client:
        with pytest.raises(errors.Cancelled, match="while it waited"):
            await client.generate("hello", timeout=5)
    assert (len(router.requests), len(router.resumes)) == (1, 0)


async def test_a_call_that_breaks_after_its_result_has_one(router: ScriptedRouter) -> None:
    router.faults = iter([Fault(EVENTS)])
    async with outrider.AsyncClient(router.address) as client:
        result = await client.generate("hello", timeout=5)
    assert_whole(result)
    assert (result.resumes, router.resumes) == (0, [])


async def test_a_resumed_call_sends_where_the_last_chunk_ended(router: ScriptedRouter) -> None:
    router.faults = iter([Fault(1), Fault(3)])
    async with outrider.AsyncClient(router.address) as client:
        result = await client.generate("hello", timeout=5)
    assert_whole(result)
    assert router.resumes == [
        pb.ResumeRequest(session_id="session-1", generation=1),
        pb.ResumeRequest(session_id="session-1", generation=1, next_position=4, text_offset=5),
    ]


async def test_a_call_that_breaks_after_every_chunk_still_finishes(router: ScriptedRouter) -> None:
    router.faults = itertools.repeat(Fault(2))
    async with outrider.AsyncClient(router.address) as client:
        chunks = await read(stream := client.stream("hello", timeout=5))
        assert_whole(stream.result, chunks)
        assert stream.result.resumes == 5


async def test_only_calls_in_a_row_that_bring_nothing_count(router: ScriptedRouter) -> None:
    fruitless = [Fault(1)] * (_stream.MAX_FAILURES - 1)
    router.faults = itertools.cycle([Fault(2), *fruitless])
    tokens: list[int] = []
    async with outrider.AsyncClient(router.address) as client:
        async for chunk in client.stream("endless", timeout=5):
            tokens += chunk.token_ids
            if len(tokens) == 4:
                break
    assert tokens == [1, 2, 3, 4]


async def test_tokens_from_the_log_arrive_in_one_chunk_without_gaps(
    router: ScriptedRouter,
) -> None:
    router.faults = iter([Fault(2, logged=3)])
    async with outrider.AsyncClient(router.address) as client:
        chunks = await read(stream := client.stream("hello", logprobs=0, timeout=5))
    assert [len(chunk.token_ids) for chunk in chunks] == [1, 3, 1]
    assert [math.isnan(gap) for gap in stream.result.gaps] == [False, True, True, True, False]
    assert len(stream.result.logprobs) == 5
    assert_whole(stream.result, chunks)


async def test_a_call_that_breaks_before_its_start_is_repeated_with_the_same_key(router: ScriptedRouter) -> None:
    router.faults = iter([Fault(0), Fault(0), Fault(0)])
    async with outrider.AsyncClient(router.address) as client:
        result = await client.generate("hello", timeout=5)
    assert_whole(result)
    assert len(router.requests) == 4
    assert all(request == router.requests[0] for request in router.requests)
    assert router.broke_off == [False, True, True, True]
    assert router.requests[0].idempotency_key
    assert len(router.answers) == 1


def test_a_call_that_waits_for_an_equal_requests_answer_ends_nobodys_generation_when_it_is_repeated() -> None:
    answer = ReceivedAnswer(pb.GenerateRequest(text="hello", idempotency_key="k"))
    assert answer.next_request(broke_off=True) == pb.GenerateRequest(text="hello", idempotency_key="k", broke_off=True)
    answer.follows = True
    assert answer.next_request(broke_off=True) == pb.GenerateRequest(text="hello", idempotency_key="k")


@pytest.mark.parametrize("after", [0, 1], ids=["before it started", "after"])
async def test_calls_that_bring_nothing_are_given_up_after_a_few(router: ScriptedRouter, after: int) -> None:
    router.faults = itertools.repeat(Fault(after, errors.Unavailable("no verifier right now")))
    async with outrider.AsyncClient(router.address) as client:
        with pytest.raises(errors.Unavailable, match="no verifier right now"):
            await client.generate("hello", timeout=5)
    assert len(router.requests) + len(router.resumes) == _stream.MAX_FAILURES
    assert router.cancelled_sessions == []  # it can still be resumed by hand


async def test_a_draining_router_is_no_failure_and_costs_no_backoff(
    router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_stream, "FIRST_PAUSE_S", 60.0)
    moved = errors.Moved("this router is going down")
    more = _stream.MAX_FAILURES + 2
    router.faults = iter([Fault(0, moved), Fault(3, moved), *[Fault(1, moved)] * more])
    async with outrider.AsyncClient(router.address) as client:
        chunks = await read(stream := client.stream("hello", timeout=5))
    assert_whole(stream.result, chunks)
    assert stream.result.resumes == 2 + more


async def test_a_generation_that_moves_endlessly_is_given_up(
    router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_stream, "MOVE_PAUSE_S", 0.001)
    router.faults = itertools.repeat(Fault(1, errors.Moved("going down")))
    async with outrider.AsyncClient(router.address) as client:
        with pytest.raises(errors.Moved):
            await client.generate("hello", timeout=5)
    assert len(router.requests) + len(router.resumes) == _stream.MAX_MOVES + 1


async def test_a_stream_that_gave_up_can_be_resumed_by_hand(router: ScriptedRouter) -> None:
    router.faults = itertools.chain([Fault(3)], itertools.repeat(Fault(1), _stream.MAX_FAILURES))
    async with outrider.AsyncClient(router.address) as client:
        chunks = []
        stream = client.stream("hello", timeout=5)
        with pytest.raises(errors.Unavailable):  # noqa: PT012, what came before counts
            async for chunk in stream:
                chunks.append(chunk)  # noqa: PERF401
    async with outrider.AsyncClient(router.address) as another:
        rest = another.resume(
            stream.session_id, next_position=chunks[-1].next_position, text_offset=chunks[-1].text_offset, timeout=5
        )
        chunks += await read(rest)
    assert "".join(chunk.text for chunk in chunks) == TEXT
    assert [token for chunk in chunks for token in chunk.token_ids] == [1, 2, 3, 4, 5]
    assert rest.result.token_ids == (3, 4, 5)
    assert rest.result.text == "(x):\n"


@pytest.mark.parametrize(
    "error",
    [
        errors.Superseded("another router has it"),
        errors.NotFound("not resumed in time"),
        errors.Busy("running"),
        errors.TokenizerMismatch("another tokenizer"),
        errors.Conflict("the log ends before"),
        errors.InternalError("a bug"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("after", [0, 3])
async def test_an_error_that_a_retry_cannot_repair_is_raised_at_once(
    router: ScriptedRouter, error: errors.OutriderError, after: int
) -> None:
    router.faults = iter([Fault(after, error)])
    async with outrider.AsyncClient(router.address) as client:
        with pytest.raises(type(error), match=str(error)):
            await client.generate("hello", timeout=5)
    assert len(router.requests) + len(router.resumes) == 1
    assert router.cancelled_sessions == []


async def test_an_overloaded_router_is_called_again_for_the_rest_after_its_retry_time(router: ScriptedRouter) -> None:
    router.faults = iter([Fault(3, errors.Overloaded("full", retry_after=0.2))])
    begin = time.monotonic()
    async with outrider.AsyncClient(router.address) as client:
        assert_whole(await client.generate("hello", timeout=5))
    assert 0.2 <= time.monotonic() - begin < 2


@pytest.mark.parametrize(
    ("after", "retry_after", "timeout"),
    [(0, 0.0, None), (3, _router.LONGEST_WAIT_S + 1, None), (3, 5.0, 2.0)],
    ids=["before it started, without retries", "for too long", "beyond the timeout"],
)
async def test_an_overload_that_the_client_may_not_wait_for_is_raised(
    router: ScriptedRouter, after: int, retry_after: float, timeout: float | None
) -> None:
    router.faults = iter([Fault(after, errors.Overloaded("full", retry_after))])
    begin = time.monotonic()
    async with outrider.AsyncClient(router.address, retries=0) as client:
        with pytest.raises(errors.Overloaded) as caught:
            await client.generate("hello", timeout=timeout)
    assert caught.value.retry_after == retry_after
    assert time.monotonic() - begin < 1
    assert len(router.requests) + len(router.resumes) == 1


async def test_a_request_refused_as_overloaded_is_sent_again_after_the_retry_time(
    router: ScriptedRouter,
) -> None:
    router.faults = iter([Fault(0, errors.Overloaded("full", retry_after=0.2)) for _ in range(2)])
    begin = time.monotonic()
    async with outrider.AsyncClient(router.address) as client:
        result = await client.generate("hello", timeout=5)
    assert_whole(result)
    assert result.resumes == 0  # nothing had begun
    assert 0.4 <= time.monotonic() - begin < 2
    assert len(router.requests) == 3
    assert all(request == router.requests[0] for request in router.requests)


async def test_retries_are_bounded(router: ScriptedRouter) -> None:
    router.faults = itertools.repeat(Fault(0, errors.Overloaded("full", retry_after=0.01)))
    async with outrider.AsyncClient(router.address) as client:
        with pytest.raises(errors.Overloaded):
            await client.generate("hello", timeout=5)
    assert len(router.requests) == 1 + _router.RETRIES
    router.faults = iter([Fault(0, errors.Overloaded("full", retry_after=3.0))])
    async with outrider.AsyncClient(router.address) as client:
        with pytest.raises(errors.Overloaded):  # at once: the timeout passes before
            await client.generate("hello", timeout=2)
    assert len(router.requests) == 2 + _router.RETRIES


def test_retry_times_are_jittered() -> None:
    pauses = {_router.jittered(2.0) for _ in range(100)}
    assert len(pauses) == 100
    assert all(2.0 <= pause <= 3.0 for pause in pauses)


async def test_the_timeout_is_for_all_calls_together(router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_stream, "FIRST_PAUSE_S", 0.1)
    router.faults = itertools.repeat(Fault(1))
    begin = time.monotonic()
    async with outrider.AsyncClient(router.address) as client:
        with pytest.raises(errors.Unavailable):
            await client.generate("hello", timeout=0.5)
        assert time.monotonic() - begin < 1
        router.faults = iter([Fault(1)])
        with pytest.raises(errors.DeadlineExceeded):
            await client.generate("slow", timeout=0.5)
    assert time.monotonic() - begin < 2


def long_pauses(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Have streams pause for two seconds before a further call. The event is set when one begins to."""
    pausing = asyncio.Event()

    def jittered(pause_s: float) -> float:
        pausing.set()
        return 2.0

    monkeypatch.setattr(_stream, "jittered", jittered)
    return pausing


async def test_a_cancel_during_a_backoff_ends_the_call_at_once(
    router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    pausing = long_pauses(monkeypatch)
    router.faults = iter([Fault(2)])
    async with outrider.AsyncClient(router.address) as client:
        stream = client.stream("hello")
        reader = asyncio.create_task(read(stream))
        await asyncio.wait_for(pausing.wait(), 5)
        begin = time.monotonic()
        await stream.cancel()
        with pytest.raises(errors.Cancelled, match="the generation was cancelled"):
            await reader
    assert time.monotonic() - begin < 1
    assert (router.cancelled_sessions, router.resumes) == (["session-1"], [])


async def test_closing_the_client_during_a_backoff_ends_the_call_at_once(
    router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    pausing = long_pauses(monkeypatch)
    router.faults = iter([Fault(2)])
    client = outrider.AsyncClient(router.address)
    stream = client.stream("hello")
    reader = asyncio.create_task(read(stream))
    await asyncio.wait_for(pausing.wait(), 5)
    begin = time.monotonic()
    await client.close()
    with pytest.raises(errors.Cancelled, match="the client was closed"):
        await reader
    assert time.monotonic() - begin < 1
    assert (router.cancelled_sessions, router.resumes) == (["session-1"], [])


async def test_a_task_that_is_cancelled_during_a_pause_stays_cancelled(
    router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_stream, "FIRST_PAUSE_S", 2.0)
    router.faults = iter([Fault(2)])
    async with outrider.AsyncClient(router.address) as client:
        stream = client.stream("hello")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(read(stream), 1.0)
        assert router.cancelled_sessions == ["session-1"]


async def test_leaving_the_loop_of_a_resumed_stream_cancels_the_generation(router: ScriptedRouter) -> None:
    router.faults = iter([Fault(3)])
    async with outrider.AsyncClient(router.address) as client:
        async for chunk in client.stream("endless"):
            if chunk.next_position > 8:
                break
        assert await asyncio.to_thread(router.cancel_came.wait, 5)
    assert router.cancelled_sessions == ["session-1"]
    assert len(router.resumes) == 1


async def test_a_generation_cancelled_by_another_client_ends_with_its_tokens_so_far(router: ScriptedRouter) -> None:
    async with outrider.AsyncClient(router.address) as client, outrider.AsyncClient(router.address) as other:
        stream = client.stream("endless")
        reader = asyncio.create_task(read(stream))
        assert await asyncio.to_thread(router.under_way.wait, 5)
        await other.cancel("session-1")
        await asyncio.wait_for(reader, 5)
    assert stream.result.finish_reason is outrider.FinishReason.CANCELLED
    assert stream.result.token_ids == tuple(range(1, len(stream.result.token_ids) + 1))


async def test_resuming_from_the_start_gives_the_whole_answer(router: ScriptedRouter) -> None:
    async with outrider.AsyncClient(router.address) as client:
        first = await client.generate("hello", timeout=5)
    async with outrider.AsyncClient(router.address) as another:
        again = another.resume(first.session_id, timeout=5)
        assert [chunk.text for chunk in await read(again)] == [TEXT]
    assert again.result.token_ids == first.token_ids
    assert all(math.isnan(gap) for gap in again.result.gaps)


async def test_a_resumed_stream_that_breaks_continues_at_its_position(router: ScriptedRouter) -> None:
    router.faults = iter([Fault(3), Fault(1), Fault(1), Fault(2)])
    async with outrider.AsyncClient(router.address) as client:
        async for _ in (stream := client.stream("hello")):
            rest = client.resume(stream.session_id, next_position=3, text_offset=4, timeout=5)
            chunks = await read(rest)
            break
    assert [token for chunk in chunks for token in chunk.token_ids] == [2, 3, 4, 5]
    assert rest.result.text == TEXT[4:]
    assert [(request.next_position, request.text_offset) for request in router.resumes[:3]] == [(3, 4)] * 3


async def test_resuming_an_unknown_session_is_not_found(router: ScriptedRouter) -> None:
    async with outrider.AsyncClient(router.address) as client:
        with pytest.raises(errors.NotFound, match="nobody"):
            await read(client.resume("nobody", timeout=5))


@pytest.mark.parametrize("field", ["generation", "next_position", "text_offset"])
@pytest.mark.parametrize("value", [-1, 2**64])
async def test_an_absurd_resume_position_is_refused_by_name(field: str, value: int) -> None:
    async with outrider.AsyncClient() as client:
        with pytest.raises(errors.InvalidRequest) as caught:
            client.resume("s", **{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize(
    "wrong",
    [
        pb.Chunk(text="again", token_ids=[1], next_position=3, text_offset=5 + len(TEXT)),
        pb.Chunk(text="gap", token_ids=[9], next_position=9, text_offset=3 + len(TEXT)),
        pb.Chunk(text="gap", token_ids=[6], next_position=8, text_offset=4 + len(TEXT)),
        pb.Chunk(text="", token_ids=[6], gaps=[1, 2], next_position=8, text_offset=len(TEXT)),
        pb.Chunk(token_ids=[6], next_position=8, text_offset=len(TEXT), logprobs=[pb.TokenLogprobs(top_ids=[1])]),
    ],
    ids=["repeated", "lost tokens", "lost text", "gaps", "log-probabilities"],
)
async def test_a_chunk_that_does_not_continue_the_answer_is_an_error_and_never_text(
    router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch, wrong: pb.Chunk
) -> None:
    events = router.events

    async def misbehaving(*arguments: object, **keywords: object) -> object:
        async for event in events(*arguments, **keywords):
            yield pb.GenerateResponse(chunk=wrong) if event.HasField("finished") else event
        await asyncio.sleep(60)

    monkeypatch.setattr(router, "events", misbehaving)
    async with outrider.AsyncClient(router.address) as client:
        stream = client.stream("hello")
        with pytest.raises(errors.InternalError, match="chunk"):
            await read(stream)
        assert await asyncio.to_thread(router.broken.wait, 5)


async def test_a_restarted_router_gets_its_streams_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_stream, "FIRST_PAUSE_S", 0.5)  # six calls have to last longer than a start
    scripted = ScriptedRouter()
    address = f"127.0.0.1:{free_port()}"
    async with outrider.AsyncClient(address) as client:
        first = served(scripted, address)
        await asyncio.to_thread(first.__enter__)
        stream = client.stream("endless", timeout=20)
        reader = asyncio.create_task(read(stream))
        assert await asyncio.to_thread(scripted.under_way.wait, 5)
        await asyncio.to_thread(first.__exit__, None, None, None)
        scripted.under_way.clear()
        with served(scripted, address):
            await goes_on(scripted, reader)
            scripted.answers[0].reason = 2
            await asyncio.wait_for(reader, 5)
    assert scripted.resumes
    assert stream.result.token_ids == tuple(range(1, len(stream.result.token_ids) + 1))


async def test_a_stream_continues_at_the_next_of_several_routers() -> None:
    scripted = ScriptedRouter()
    first, second = free_port(), free_port()
    router = served(scripted, f"127.0.0.1:{first}")
    await asyncio.to_thread(router.__enter__)
    with served(scripted, f"127.0.0.1:{second}"):
        async with outrider.AsyncClient(f"ipv4:127.0.0.1:{first},127.0.0.1:{second}") as client:
            stream = client.stream("endless", timeout=20)
            reader = asyncio.create_task(read(stream))
            assert await asyncio.to_thread(scripted.under_way.wait, 5)
            await asyncio.to_thread(router.__exit__, None, None, None)
            scripted.under_way.clear()
            await goes_on(scripted, reader)
            scripted.answers[0].reason = 2
            await asyncio.wait_for(reader, 5)
    assert stream.result.token_ids == tuple(range(1, len(stream.result.token_ids) + 1))


async def test_a_connection_that_is_cut_costs_nothing_even_before_anything_came(router: ScriptedRouter) -> None:
    async with FaultProxy(router.address) as proxy, outrider.AsyncClient(proxy.address) as client:
        waiting = asyncio.create_task(client.generate("mute"))  # the first call of all, and it never starts
        assert await asyncio.to_thread(router.under_way.wait, 5)
        proxy.cut()
        await until(lambda: len(router.requests) == 2)
        waiting.cancel()
        stream, chunks = client.stream("endless", timeout=20), list[outrider.Chunk]()

        async def read_chunks() -> None:
            async for chunk in stream:
                chunks.append(chunk)

        reader = asyncio.create_task(read_chunks())
        await until(lambda: len(chunks) > 5)
        proxy.cut()
        await until(lambda: router.resumes)
        await until(lambda: len(chunks) > 20)
        router.answers[-1].reason = 2
        await asyncio.wait_for(reader, 5)
    assert stream.result.token_ids == tuple(range(1, len(stream.result.token_ids) + 1))
    assert stream.result.resumes


async def test_a_request_whose_router_is_lost_is_sent_again(router: ScriptedRouter) -> None:
    async with FaultProxy(router.address) as proxy, outrider.AsyncClient(proxy.address) as client:
        await client.models(timeout=5)
        for _ in range(20):
            asking = asyncio.create_task(client.models(timeout=5))
            await asyncio.sleep(0)
            proxy.cut()
            assert [model.name for model in await asking] == ["toy"]
        proxy.refuse()
        proxy.cut()
        began = time.monotonic()
        with pytest.raises(errors.Unavailable):
            await client.models(timeout=5)
        assert time.monotonic() - began < 3


def test_the_ordinary_client_resumes_too(router: ScriptedRouter) -> None:
    router.faults = iter([Fault(0), Fault(2), Fault(1), Fault(3, logged=1)])
    with outrider.Client(router.address) as client:
        stream = client.stream("hello", timeout=5)
        chunks = list(stream)
        assert_whole(stream.result, chunks)
        assert stream.result.resumes == 4
        rest = client.resume(stream.session_id, next_position=4, text_offset=5, timeout=5)
        assert [chunk.token_ids for chunk in rest] == [(3, 4, 5)]


async def read(stream: outrider.AsyncStream) -> list[outrider.Chunk]:
    return [chunk async for chunk in stream]


async def goes_on(router: ScriptedRouter, reader: asyncio.Task[list[outrider.Chunk]]) -> None:
    """Return once the router sends chunks again; raises what the reader failed with meanwhile."""
    sending = asyncio.create_task(asyncio.to_thread(router.under_way.wait, 10))
    await asyncio.wait({sending, reader}, return_when=asyncio.FIRST_COMPLETED)
    if reader.done():
        reader.result()
    assert await sending


async def until(holds: Callable[[], object]) -> None:
    """Waits for a condition, at most five seconds."""
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.005)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
