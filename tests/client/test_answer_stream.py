"""A client with several generations: their events come on one stream, which nobody notices when it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import outrider
from outrider.client import _calls, _router
from outrider.errors import Cancelled, InternalError, Unavailable
from outrider.v1 import inference_pb2 as pb
from router.api.answer_streams import WINDOW_BYTES
from tests.client.conftest import ScriptedRouter
from tests.router import fakes
from tests.router.rig import script, scripted_router, until


@asynccontextmanager
async def client_of(redis_url: str, monkeypatch: pytest.MonkeyPatch, **verifying: Any) -> AsyncIterator[Any]:
    """A client of a router whose verifier commits SCRIPT over and over."""
    monkeypatch.setattr(fakes, "CONTEXT", 200_000)
    async with scripted_router(redis_url, **verifying) as rig, outrider.AsyncClient(rig.address) as client:
        yield client


class Seen:
    """What the clients of a test have opened."""

    def __init__(self) -> None:
        self.streams: list[SeenStream] = []
        self.calls: list[SeenCall] = []
        self.read: list[SeenRead] = []

    @property
    def stream(self) -> SeenStream | None:
        """The stream of answers that runs."""
        return self.streams[-1] if self.streams and self.streams[-1].running else None


class SeenStream(_calls.AnswerStream):
    """A stream of answers that shows its calls."""

    def __init__(self, call: Any, on_end: Any) -> None:
        super().__init__(call, on_end)
        self.call = call
        self.calls: dict[int, Any] = {}  # those that run

    def add(self, call: Any) -> int:
        handle = super().add(call)
        self.calls[handle] = call
        return handle

    def remove(self, handle: int) -> None:
        super().remove(handle)
        self.calls.pop(handle, None)


class SeenCall(_calls.RoutedCall):
    """A call that shows the events which its stream has brought, and how many its reader has taken."""

    def __init__(self, *arguments: Any) -> None:
        self.events: list[pb.GenerateResponse] = []
        self.taken = 0
        super().__init__(*arguments)

    def receive(self, event: pb.GenerateResponse) -> None:
        self.events.append(event)
        super().receive(event)

    async def next(self) -> pb.GenerateResponse | None:
        event = await super().next()
        self.taken += 1
        return event


class SeenRead(_calls.PlainCall):
    """The reading of a call itself, which shows how many events it has brought, and whether it is over."""

    events = 0
    over = False

    async def next(self) -> pb.GenerateResponse | None:
        event: pb.GenerateResponse | None = None
        try:
            event = await super().next()
        finally:
            self.over = event is None
            self.events += event is not None
        return event


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen = Seen()

    def stream(*arguments: Any) -> SeenStream:
        seen.streams.append(SeenStream(*arguments))
        return seen.streams[-1]

    def call(*arguments: Any) -> SeenCall:
        seen.calls.append(SeenCall(*arguments))
        return seen.calls[-1]

    def read(*arguments: Any) -> SeenRead:
        seen.read.append(SeenRead(*arguments))
        return seen.read[-1]

    monkeypatch.setattr(_calls, "PlainCall", read)
    monkeypatch.setattr(_router, "AnswerStream", stream)
    monkeypatch.setattr(_router, "RoutedCall", call)
    return seen


async def test_one_generation_at_a_time_opens_no_answer_stream(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, seen: Seen
) -> None:
    async with client_of(redis_url, monkeypatch) as client:
        for _ in range(2):
            assert (await client.generate("a", max_tokens=20)).token_ids == tuple(script(20))
            assert seen.stream is None


async def test_several_generations_share_a_stream_and_each_is_whole(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, seen: Seen
) -> None:
    async with client_of(redis_url, monkeypatch) as client:
        running = [asyncio.create_task(client.generate("a", max_tokens=100, logprobs=2)) for _ in range(8)]
        results = await asyncio.gather(*running)
        assert seen.stream is not None
        assert {result.token_ids for result in results} == {tuple(script(100))}
        assert {result.resumes for result in results} == {0}
        assert not seen.stream.calls


async def test_a_long_answer_continues_past_the_window(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with client_of(redis_url, monkeypatch, stride=16) as client:
        results = await asyncio.gather(*(client.generate("a", max_tokens=3_000, logprobs=20) for _ in range(3)))
        assert {result.token_ids for result in results} == {tuple(script(3_000))}
        assert {result.resumes for result in results} == {0}


async def test_a_stream_that_nobody_reads_holds_up_no_other(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, seen: Seen
) -> None:
    async with client_of(redis_url, monkeypatch, stride=16) as client:
        first = asyncio.create_task(client.generate("a", max_tokens=40_000))
        await asyncio.sleep(0.1)
        unread = client.stream("a", max_tokens=40_000, logprobs=20)
        chunks = aiter(unread)
        received = [*(await anext(chunks)).token_ids]
        call = seen.calls[-1]
        assert (await client.generate("a", max_tokens=2_000, logprobs=20)).token_ids == tuple(script(2_000))
        await asyncio.sleep(0.3)
        held = [event.ByteSize() for event in call.events[call.taken :]]
        assert sum(held) <= WINDOW_BYTES + max(held)
        while len(received) < 2_000:  # then it is read after all
            received += (await anext(chunks)).token_ids
        assert tuple(received) == tuple(script(len(received)))
        await unread.cancel()
        first.cancel()


async def test_generations_continue_when_the_answer_stream_breaks(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, seen: Seen
) -> None:
    monkeypatch.setattr(_router, "ANSWERS_PAUSE_S", 0.05)
    async with client_of(redis_url, monkeypatch, pace_s=0.005) as client:
        running = [asyncio.create_task(client.generate("a", max_tokens=300)) for _ in range(6)]
        for _ in range(2):
            await until(
                lambda: seen.stream is not None and any(call.events for call in seen.stream.calls.values())
            )  # a call whose events have not come on it goes on by itself
            broken = seen.stream
            assert broken is not None
            broken.call.cancel()
            await until(lambda broken=broken: seen.stream is not broken)  # type: ignore[misc]
        results = await asyncio.gather(*running)
        assert {result.token_ids for result in results} == {tuple(script(300))}
        assert max(result.resumes for result in results) >= 1


async def test_leaving_a_stream_cancels_only_that_stream(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, seen: Seen
) -> None:
    async with client_of(redis_url, monkeypatch, pace_s=0.005) as client:
        staying = asyncio.create_task(client.generate("a", max_tokens=100))
        await asyncio.sleep(0.05)
        async with client.stream("a", max_tokens=10_000) as leaving:
            await anext(aiter(leaving))
            assert seen.stream is not None
            assert seen.calls[-1] in seen.stream.calls.values()
        session = await client.get_session(leaving.session_id)
        assert session.finish_reason is outrider.FinishReason.CANCELLED
        assert (await staying).token_ids == tuple(script(100))
        assert not seen.stream.calls


async def test_closing_the_client_ends_streams_and_their_stream(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, seen: Seen
) -> None:
    async with client_of(redis_url, monkeypatch, pace_s=0.005) as client:
        running = [asyncio.create_task(client.generate("a", max_tokens=10_000)) for _ in range(3)]
        await until(lambda: seen.stream is not None)
        await asyncio.sleep(0.1)
        await client.close()
        results = await asyncio.gather(*running, return_exceptions=True)
        assert [type(result) for result in results] == [Cancelled] * 3


async def test_a_stream_without_calls_is_closed_and_opened_again(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, seen: Seen
) -> None:
    monkeypatch.setattr(_calls, "IDLE_S", 0.1)
    async with client_of(redis_url, monkeypatch) as client:
        for _ in range(2):
            results = await asyncio.gather(*(client.generate("a", max_tokens=50) for _ in range(3)))
            assert {result.token_ids for result in results} == {tuple(script(50))}
            assert {result.resumes for result in results} == {0}
            used = seen.stream
            assert used is not None
            await until(lambda: seen.stream is None)
            assert not used.running


async def test_a_router_without_answer_streams_is_not_asked_for_one_again_at_once(
    router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch, seen: Seen
) -> None:
    monkeypatch.setattr(_router, "ANSWERS_PAUSE_S", 60.0)
    async with outrider.AsyncClient(router.address) as client:
        for _ in range(2):
            results = await asyncio.gather(*(client.generate("hello") for _ in range(4)))
            assert len({result.text for result in results}) == 1
            assert {result.resumes for result in results} == {0}
            await until(lambda: seen.stream is None)
        assert router.streams == 1


async def test_a_call_holds_few_unread_events_and_loses_none(router: ScriptedRouter, seen: Seen) -> None:
    async with outrider.AsyncClient(router.address) as client, client.stream("endless") as first:
        await anext(aiter(first))
        async with client.stream("endless") as unread:
            chunks = aiter(unread)
            await anext(chunks)
            await asyncio.sleep(0.3)  # meanwhile a hundred more are sent
            assert seen.read[-1].events - seen.calls[-1].taken == _calls.MAX_HELD
            for _ in range(300):  # tokens continue one another, or an error is raised
                await anext(chunks)
            await asyncio.sleep(0.1)
        await until(lambda: seen.read[-1].over)


async def test_the_last_events_may_arrive_after_the_end_of_their_call(monkeypatch: pytest.MonkeyPatch) -> None:
    call, stream = EndedCall(), SilentStream()
    routed = _calls.RoutedCall(call, lambda error: InternalError(str(error)), stream)
    await asyncio.sleep(0)
    taking = asyncio.create_task(routed.next())
    await asyncio.sleep(0.01)
    assert not taking.done()
    last = pb.GenerateResponse(finished=pb.Finished())
    routed.receive(last)
    assert await taking == last
    assert await routed.next() is None

    monkeypatch.setattr(_calls, "LATE_S", 0.05)
    routed = _calls.RoutedCall(call, lambda error: InternalError(str(error)), stream)
    with pytest.raises(Unavailable, match="did not come"):
        await routed.next()


class EndedCall:
    """A call that has ended well and brought nothing itself."""

    def __aiter__(self) -> AsyncIterator[object]:
        async def nothing() -> AsyncIterator[object]:
            return
            yield

        return nothing()

    def cancel(self) -> None:
        pass


class SilentStream:
    """A stream of answers on which nothing has come yet."""

    running = True

    def add(self, call: object) -> int:
        return 1

    def remove(self, handle: int) -> None:
        pass
