"""Calls that are refused change nothing: no generation that runs is disturbed, and no lease is left."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.v1 import inference_pb2 as pb
from outrider.v1 import types_pb2
from router.sessions.outbox import FLUSH_S
from tests.router import fakes
from tests.router.fakes import FakeVerifier
from tests.router.rig import SCRIPT, Rig, ask, collect, drain
from tests.router.test_tenants import Metadata, two_tenants

RUNNING = 16  # generations
CALLS = 700
TOKENS = 100_000  # of an answer: more than are decoded meanwhile
AT_ONCE = 32

Call = Callable[[], Awaitable[Any]]


def resume(session: str, position: int = 0, offset: int = 0, generation: int = 0) -> pb.ResumeRequest:
    return pb.ResumeRequest(session_id=session, next_position=position, text_offset=offset, generation=generation)


def calls(
    rig: Rig, running: list[str], ended: str, empty: str, closed: str, mine: Metadata, theirs: Metadata
) -> Iterator[tuple[str, Call]]:
    """Calls that are to be refused, or to change nothing, without end."""

    def resumed(request: pb.ResumeRequest, metadata: Metadata = mine) -> Call:
        return lambda: drain(rig.stub.Resume(request, metadata=metadata))

    def cancelled(session: str, metadata: Metadata = mine) -> Call:
        return lambda: rig.stub.Cancel(pb.CancelRequest(session_id=session), metadata=metadata)

    def gone(session: str, metadata: Metadata = mine) -> Call:
        return lambda: rig.stub.CloseSession(pb.CloseSessionRequest(session_id=session), metadata=metadata)

    for session in cycle(running):
        yield "invalid offset", resumed(resume(session, 0, 1_000_000))
        yield "invalid position", resumed(resume(session, 1))
        yield "huge position", resumed(resume(session, 2**40))
        yield "early generation", resumed(resume(session, 0, 0, 2))
        yield "early resume", resumed(resume(empty))
        yield "foreign resume", resumed(resume(session), theirs)
        yield "foreign cancel", cancelled(session, theirs)
        yield "foreign close", gone(session, theirs)
        yield "late generation", resumed(resume(ended, 0, 0, 1))
        yield "late resume", resumed(resume(closed))
        yield "late cancel", cancelled(closed)
        yield "repeated cancel", cancelled(ended)
        yield "repeated close", gone(closed)
        yield "no session", resumed(resume("nobody"))


async def outcome(call: Call) -> grpc.StatusCode:
    try:
        await call()
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_refused_calls_disturb_no_generation_and_hold_no_lease(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fakes, "CONTEXT", 2 * TOKENS)
    verifier = FakeVerifier(SCRIPT, stride=4, pace_s=0.01)
    async with two_tenants(redis_url, verifier) as (rig, mine, theirs):
        [worker] = await rig.registry.workers()
        await rig.registry.announce(replace(worker, slots=2 * RUNNING), ttl_s=60)

        async def ask_mine(count: int, session: str = "") -> tuple[pb.Started, list[pb.Chunk], pb.Finished]:
            request = ask(max_tokens=count)
            request.session_id = session
            return await collect(rig.stub.Generate(request, metadata=mine))

        ended = (await ask_mine(4))[0].session_id
        await ask_mine(4, ended)
        closed = (await ask_mine(4))[0].session_id
        await rig.stub.CloseSession(pb.CloseSessionRequest(session_id=closed), metadata=mine)
        empty = (await rig.stub.CreateSession(pb.CreateSessionRequest(), metadata=mine)).session_id

        streams = [rig.stub.Generate(ask(max_tokens=TOKENS), metadata=mine) for _ in range(RUNNING)]
        running = [(await stream.read()).started.session_id for stream in streams]
        readers = [asyncio.create_task(drain(stream)) for stream in streams]
        epochs = [(await rig.sessions.get(session)).epoch for session in running]

        outcomes: Counter[tuple[str, grpc.StatusCode]] = Counter()
        refused = calls(rig, running, ended, empty, closed, mine, theirs)
        left = iter(range(CALLS))

        async def pound() -> None:
            for _ in left:
                kind, call = next(refused)
                outcomes[kind, await outcome(call)] += 1

        await asyncio.gather(*(pound() for _ in range(AT_ONCE)))
        assert not any(reader.done() for reader in readers)
        assert outcomes.total() == CALLS
        fine = {"repeated cancel", "repeated close", "foreign close"}
        assert {kind for kind, code in outcomes if code is grpc.StatusCode.OK} <= fine, outcomes
        unexpected = {grpc.StatusCode.INTERNAL, grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE}
        assert not unexpected & {code for _, code in outcomes}, outcomes
        assert [(await rig.sessions.get(session)).epoch for session in running] == epochs

        for session in running:
            await rig.stub.Cancel(pb.CancelRequest(session_id=session), metadata=mine)
        for events in await asyncio.gather(*readers):
            assert events[-1].finished.reason == types_pb2.FINISH_REASON_CANCELLED
            tokens = [token for event in events for token in event.chunk.token_ids]
            assert tokens == [SCRIPT[index % len(SCRIPT)] for index in range(len(tokens))]
        await asyncio.sleep(FLUSH_S)
        for session in [*running, ended, empty]:
            assert not (await rig.sessions.get(session)).lease


async def test_a_resume_that_takes_a_generation_over_ends_the_earlier_call_at_once(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=1.5)  # so that the log does not end it
    async with two_tenants(redis_url, verifier) as (rig, mine, _):
        before = rig.stub.Generate(ask(max_tokens=1), metadata=mine)
        session = (await before.read()).started.session_id
        began = time.monotonic()
        after = asyncio.create_task(drain(rig.stub.Resume(resume(session), metadata=mine)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await drain(before)
        assert caught.value.code() == grpc.StatusCode.ABORTED
        assert time.monotonic() - began < 0.75
        tokens = [token for event in await after for token in event.chunk.token_ids]
        assert tokens == SCRIPT[:1]


async def test_the_later_epoch_of_two_resumes_wins_in_any_order(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from router.sessions.takeover import Takeovers

    verifier = FakeVerifier(SCRIPT, pace_s=0.2)
    real, first = Takeovers.take, True

    async def slowly(*arguments: Any) -> Any:
        nonlocal first
        late, first = first, False
        opened = await real(*arguments)
        await asyncio.sleep(0.6 * late)  # it has the lower epoch, and has yet to register
        return opened

    async with two_tenants(redis_url, verifier) as (rig, mine, _):
        call = rig.stub.Generate(ask(max_tokens=8), metadata=mine)
        session = (await call.read()).started.session_id
        call.cancel()
        monkeypatch.setattr(Takeovers, "take", slowly)
        early = asyncio.create_task(drain(rig.stub.Resume(resume(session), metadata=mine)))
        await asyncio.sleep(0.2)
        tokens = [
            token
            for event in await drain(rig.stub.Resume(resume(session), metadata=mine))
            for token in event.chunk.token_ids
        ]
        assert tokens == [SCRIPT[index % len(SCRIPT)] for index in range(8)]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await early
        assert caught.value.code() == grpc.StatusCode.ABORTED
