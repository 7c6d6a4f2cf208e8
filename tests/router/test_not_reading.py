"""Clients that do not read hold up neither other callers, nor a Cancel, a Close, a deadline or a drain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from outrider.errors import Moved
from outrider.rpc.status import from_rpc_error
from outrider.v1 import inference_pb2 as pb
from outrider.v1.inference_pb2_grpc import InferenceStub
from router.sessions import outbox
from tests.http2 import Http2Client
from tests.router import fakes
from tests.router.fakes import FakeVerifier, announced
from tests.router.rig import MODEL, SCRIPT, Rig, ask, collect, drain, running_router, until
from tests.router.test_slow_readers import SMALL

SLOTS = 4
TOKENS = 100_000  # of an answer that no client reads to its end
GENERATE = "/outrider.v1.Inference/Generate"


@pytest.fixture
def verifier(monkeypatch: pytest.MonkeyPatch) -> FakeVerifier:
    monkeypatch.setattr(fakes, "CONTEXT", 2 * TOKENS)
    verifier = FakeVerifier(SCRIPT, stride=16)
    verifier.slots = SLOTS
    return verifier


@asynccontextmanager
async def cluster(redis_url: str, verifier: FakeVerifier, **options: Any) -> AsyncIterator[Rig]:
    async with (
        running_router(redis_url, max_sessions=SLOTS, **options) as rig,
        announced(verifier, rig.registry, MODEL.digest),
    ):
        await asyncio.sleep(0.5)  # until the router has looked
        yield rig


@asynccontextmanager
async def unread(rig: Rig, count: int, **sampling: Any) -> AsyncIterator[list[tuple[str, Any]]]:
    """Calls whose clients read the beginning and no more, with their sessions."""
    async with AsyncExitStack() as stack:

        async def begin() -> tuple[str, Any]:
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(rig.address, options=SMALL))
            call = InferenceStub(channel).Generate(ask(**{"max_tokens": TOKENS, "logprobs": 20} | sampling))
            return (await call.read()).started.session_id, call

        calls = await asyncio.gather(*(begin() for _ in range(count)))
        yield calls
        for _, call in calls:
            call.cancel()


async def first_token_s(rig: Rig) -> float:
    """Until a caller that reads has its first token; it then reads to the end."""
    began = time.monotonic()
    call = rig.stub.Generate(ask(max_tokens=16), timeout=8)
    await call.read()
    await call.read()
    took = time.monotonic() - began
    await drain(call)
    return took


@pytest.mark.parametrize("count", [SLOTS, 10 * SLOTS], ids=["as many as slots", "ten times as many"])
async def test_other_clients_are_served_at_once_beside_clients_that_do_not_read(
    redis_url: str, verifier: FakeVerifier, count: int
) -> None:
    async with cluster(redis_url, verifier) as rig:
        await first_token_s(rig)
        async with unread(rig, count) as calls:
            took = [await first_token_s(rig) for _ in range(20)]
            assert max(took) < outbox.SLOW_CLIENT_S / 2  # no client had to lose a place for it
            assert sorted(took)[len(took) // 2] < 0.5
            # A client that reads after all is given its whole answer, by the same call where that still runs.
            tokens = [token for event in await drained(calls[0][1], 2000) for token in event.chunk.token_ids]
            assert tokens == [SCRIPT[index % len(SCRIPT)] for index in range(len(tokens))]
            assert len(tokens) >= 2000


async def drained(call: Any, tokens: int) -> list[pb.GenerateResponse]:
    """Events of a call until they have `tokens` tokens."""
    events: list[pb.GenerateResponse] = []
    while sum(len(event.chunk.token_ids) for event in events) < tokens:
        events.append(await call.read())
    return events


async def test_a_client_that_stopped_reading_resumes_where_it_stopped(
    redis_url: str, verifier: FakeVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "SLOW_CLIENT_S", 0.5)
    async with cluster(redis_url, verifier) as rig, unread(rig, 1, max_tokens=1000) as [(session, call)]:
        await leaseless(rig, session, 3.0)
        events: list[pb.GenerateResponse] = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await drain(call, events)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        last = events[-1].chunk
        resume = pb.ResumeRequest(session_id=session, next_position=last.next_position, text_offset=last.text_offset)
        _, chunks, _ = await collect(rig.stub.Resume(resume))
        tokens = [token for chunk in [*(event.chunk for event in events), *chunks] for token in chunk.token_ids]
        assert tokens == [SCRIPT[index % len(SCRIPT)] for index in range(1000)]


async def test_an_unread_replay_gives_up_its_slot(
    redis_url: str, verifier: FakeVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "SLOW_CLIENT_S", 0.5)
    async with cluster(redis_url, verifier) as rig:
        call = rig.stub.Generate(ask(max_tokens=TOKENS, logprobs=20))
        events = await drained(call, 2000)
        call.cancel()
        session = (await rig_sessions(rig))[0]
        await leaseless(rig, session, 3.0)
        async with grpc.aio.insecure_channel(rig.address, options=SMALL) as channel:
            again = InferenceStub(channel).Resume(pb.ResumeRequest(session_id=session))
            assert (await again.read()).started.session_id == session
            assert (await rig.sessions.get(session)).lease
            await leaseless(rig, session, 3.0)
            await until(lambda: verifier.open == 0)
            again.cancel()
        assert events


async def rig_sessions(rig: Rig) -> list[str]:
    return [session async for session in rig.sessions.ids()]


async def leaseless(rig: Rig, session: str, within_s: float) -> None:
    """Return when no router owns the session any more."""
    async with asyncio.timeout(within_s):
        while (await rig.sessions.get(session)).lease:
            await asyncio.sleep(0.01)


async def cancel(rig: Rig, session: str) -> None:
    await rig.stub.Cancel(pb.CancelRequest(session_id=session), timeout=5)


async def close(rig: Rig, session: str) -> None:
    await rig.stub.CloseSession(pb.CloseSessionRequest(session_id=session), timeout=5)


@pytest.mark.parametrize("end", [cancel, close])
async def test_a_generation_that_is_not_read_is_ended_within_a_second(
    redis_url: str, verifier: FakeVerifier, end: Callable[[Rig, str], Awaitable[None]]
) -> None:
    async with cluster(redis_url, verifier) as rig, unread(rig, SLOTS) as calls:
        await asyncio.sleep(0.5)  # until all stand still
        began = time.monotonic()
        await asyncio.gather(*(end(rig, session) for session, _ in calls))
        await until(lambda: verifier.open == 0)
        assert time.monotonic() - began < 1.0
        for session, _ in calls:
            record = await rig.sessions.get(session)
            assert record.finished == "cancelled"
            assert not record.lease


async def test_a_deadline_ends_a_generation_whose_client_does_not_read(redis_url: str, verifier: FakeVerifier) -> None:
    async with cluster(redis_url, verifier) as rig, Http2Client(rig.address) as client:
        client.call(GENERATE, ask(max_tokens=TOKENS, logprobs=20).SerializeToString(), timeout="2S")
        answering = asyncio.create_task(client.drip(0, 0.0))
        await asyncio.sleep(3.0)
        answering.cancel()
        [session] = await rig_sessions(rig)
        record = await rig.sessions.get(session)
        assert record.finished == "deadline"
        assert not record.lease
        await until(lambda: verifier.open == 0)


async def test_a_drain_does_not_wait_for_clients_that_do_not_read(redis_url: str, verifier: FakeVerifier) -> None:
    async with AsyncExitStack() as stack:
        router = AsyncExitStack()
        rig = await router.enter_async_context(cluster(redis_url, verifier, drain_s=5.0))
        calls = await stack.enter_async_context(unread(rig, SLOTS))
        await asyncio.sleep(0.5)
        began = time.monotonic()
        await router.aclose()
        assert time.monotonic() - began < 1.5  # the announcement's and the rig's own ends included
        for _, call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await drain(call)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("window", [1, 64], ids=["a byte", "64 bytes"])
async def test_clients_with_a_tiny_window_hold_up_no_other(
    redis_url: str, verifier: FakeVerifier, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(outbox, "SLOW_CLIENT_S", 1.0)
    request = ask(max_tokens=TOKENS, logprobs=20).SerializeToString()
    async with cluster(redis_url, verifier) as rig, AsyncExitStack() as stack:
        for _ in range(SLOTS):
            client = await stack.enter_async_context(Http2Client(rig.address, window=window))
            client.call(GENERATE, request)
            reading = asyncio.create_task(client.drip(1, 0.2))
            stack.callback(reading.cancel)
        await asyncio.sleep(0.5)
        took = [await first_token_s(rig) for _ in range(5)]
        assert max(took) < 3.0
        async with asyncio.timeout(4):
            while verifier.open:
                await asyncio.sleep(0.05)


async def test_a_moved_client_receives_the_move_behind_its_unread_events(
    redis_url: str, verifier: FakeVerifier
) -> None:
    router = AsyncExitStack()
    rig = await router.enter_async_context(cluster(redis_url, verifier))
    async with unread(rig, 1) as [(_, call)]:
        await asyncio.sleep(0.3)
        closing = asyncio.create_task(router.aclose())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await drain(call)
        assert isinstance(from_rpc_error(caught.value), Moved)
        await closing
