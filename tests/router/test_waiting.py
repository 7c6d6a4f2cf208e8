"""Calls that wait for a place, verifiers that have none after all, and who goes down in order: seen by clients."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio
import pytest

import outrider
from outrider.client import _stream
from outrider.errors import Cancelled, Moved
from outrider.rpc.channels import open_channel
from outrider.rpc.status import from_rpc_error
from outrider.store.sessions import Sessions
from outrider.v1 import inference_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.inference_pb2_grpc import InferenceStub
from router.sessions import maintenance
from router.sessions.session_open import GenerationOpener
from router.sessions.takeover import OpenedGeneration
from tests.router.fakes import FakeVerifier, announced
from tests.router.rig import ANSWER, MODEL, SCRIPT, Rig, ask, collect, drain, finished_reason, running_router, until


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


async def sessions_in(rig: Rig) -> int:
    return len([key async for key in rig.client.scan_iter("*:session")])


async def test_a_queued_request_exists_only_in_the_queue_and_leaves_with_its_caller(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=10)
    async with running_router(redis_url, max_sessions=1) as rig, announced(verifier, rig.registry, MODEL.digest):
        first = rig.stub.Generate(ask(max_tokens=2))
        await first.read()
        gone = rig.stub.Generate(ask(max_tokens=2))
        late = rig.stub.Generate(ask(max_tokens=2), timeout=0.2)
        began = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await drain(late)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - began < 1.0
        gone.cancel()
        assert await sessions_in(rig) == 1
        first.cancel()
        await until(lambda: verifier.open == 0)
        verifier.pace_s = 0
        await collect(rig.stub.Generate(ask(max_tokens=2)))
        assert len(verifier.starts) == 2  # no step was started for the others


async def test_a_cancel_ends_a_queued_request_before_any_step(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=10)
    async with (
        running_router(redis_url, max_sessions=1) as rig,
        announced(verifier, rig.registry, MODEL.digest),
        outrider.AsyncClient(rig.address) as client,
    ):
        first = rig.stub.Generate(ask(max_tokens=2))
        await first.read()
        session, other = [(await client.create_session()).session_id for _ in range(2)]
        waiting = asyncio.create_task(client.generate("a", session=session, max_tokens=2))
        another = asyncio.create_task(client.generate("a", session=other, max_tokens=2))
        await asyncio.sleep(0.1)
        await client.cancel(session)
        with pytest.raises(Cancelled, match="while it waited"):
            await asyncio.wait_for(waiting, 1)
        assert not another.done()
        assert not (await client.get_session(session)).running
        first.cancel()
        verifier.pace_s = 0
        assert (await asyncio.wait_for(another, 3)).finish_reason == "length"
        assert (await client.generate("a", session=session, max_tokens=2)).finish_reason == "length"
        assert len(verifier.starts) == 3  # the first one's, the other's, and that of the turn after the cancel


async def test_a_cancel_during_the_begin_of_a_generation_ends_the_generation(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    beginning, go_on = asyncio.Event(), asyncio.Event()
    real = GenerationOpener.begin

    async def held_up(*arguments: Any) -> OpenedGeneration:
        beginning.set()
        await go_on.wait()
        return await real(*arguments)

    monkeypatch.setattr(GenerationOpener, "begin", held_up)
    verifier = FakeVerifier(SCRIPT)
    async with (
        running_router(redis_url) as rig,
        announced(verifier, rig.registry, MODEL.digest),
        outrider.AsyncClient(rig.address) as client,
    ):
        session = (await client.create_session()).session_id
        answer = asyncio.create_task(client.generate("a", session=session, max_tokens=20))
        await beginning.wait()
        cancel = asyncio.create_task(client.cancel(session))
        await asyncio.sleep(0.05)
        assert not cancel.done()
        go_on.set()
        assert (await asyncio.wait_for(answer, 3)).finish_reason == "cancelled"
        await cancel
        assert (await client.get_session(session)).finish_reason == "cancelled"
        assert verifier.steps == 0


async def test_batch_requests_wait_behind_interactive_ones_and_a_wrong_priority_is_named(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.05)
    async with running_router(redis_url, max_sessions=1) as rig, announced(verifier, rig.registry, MODEL.digest):
        first = rig.stub.Generate(ask(max_tokens=8))
        await first.read()
        batch, person = ask(max_tokens=3), ask(max_tokens=4)
        batch.priority = pb.PRIORITY_BATCH
        calls = []
        for request in (batch, person):
            calls.append(asyncio.create_task(collect(rig.stub.Generate(request))))
            await asyncio.sleep(0.1)
        await asyncio.gather(drain(first), *calls)
        assert [start.contract.max_tokens for start in verifier.starts] == [8, 4, 3]
        wrong = ask()
        wrong.priority = 7  # type: ignore[assignment]
        with pytest.raises(grpc.aio.AioRpcError, match="priority: is 7"):
            await collect(rig.stub.Generate(wrong))


async def test_a_request_refused_by_full_verifiers_waits_with_its_lease_and_continues(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT)
    verifier.full = True
    async with (
        running_router(redis_url, lease_s=0.5, resume_ttl_s=0) as rig,
        announced(verifier, rig.registry, MODEL.digest),
    ):
        call = asyncio.create_task(collect(rig.stub.Generate(ask(max_tokens=len(SCRIPT)))))
        while not [session async for session in rig.sessions.ids()]:
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.5)  # three leases
        assert not call.done()
        [session] = [session async for session in rig.sessions.ids()]
        assert (await rig.sessions.get(session)).lease > time.time()
        verifier.full = False
        started, chunks, finished = await asyncio.wait_for(call, 5)
        assert "".join(chunk.text for chunk in chunks) == ANSWER
        assert (await rig.sessions.get(started.session_id)).epoch == 1  # no other router could have taken it
        assert finished.usage.first_token_us > 1_500_000


async def test_a_draining_verifier_is_no_failure_and_another_one_is_waited_for(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    leaving, steady = FakeVerifier(SCRIPT, pace_s=0.005), FakeVerifier(SCRIPT, pace_s=0.005)
    leaving.moves_after = 4
    async with running_router(redis_url) as rig, AsyncExitStack() as stack:
        await stack.enter_async_context(announced(leaving, rig.registry, MODEL.digest))
        call = asyncio.create_task(collect(rig.stub.Generate(ask(max_tokens=len(SCRIPT)))))
        await until(lambda: leaving.steps == 4)
        await until(lambda: leaving.open == 0)
        await asyncio.sleep(0.4)
        assert not call.done()
        assert len(leaving.starts) == 1  # though it is listed still
        await stack.enter_async_context(announced(steady, rig.registry, MODEL.digest))
        started, chunks, _ = await asyncio.wait_for(call, 5)
        assert "".join(chunk.text for chunk in chunks) == ANSWER
        assert (await rig.sessions.get(started.session_id)).epoch == 2
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_no_session_is_placed_on_a_draining_worker(redis_url: str) -> None:
    leaving, steady = FakeVerifier(SCRIPT), FakeVerifier(SCRIPT)
    async with (
        running_router(redis_url) as rig,
        announced(leaving, rig.registry, MODEL.digest, draining=True),
        announced(steady, rig.registry, MODEL.digest, sessions=5),
    ):
        await collect(rig.stub.Generate(ask(max_tokens=2)))
        assert (len(leaving.starts), len(steady.starts)) == (0, 1)


async def test_a_draining_router_hands_all_generations_to_another_at_once(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_stream, "FIRST_PAUSE_S", 60.0)  # longer than the test: no client may back off
    verifier = FakeVerifier(SCRIPT, pace_s=0.02)
    ports = free_port(), free_port()
    first, second = (f"127.0.0.1:{port}" for port in ports)
    async with AsyncExitStack() as stack:
        old = running_router(redis_url, listen=first, max_sessions=6)
        rig = await old.__aenter__()
        await stack.enter_async_context(announced(verifier, rig.registry, MODEL.digest))
        await stack.enter_async_context(running_router(redis_url, listen=second))
        client = await stack.enter_async_context(outrider.AsyncClient(f"ipv4:{first},{second}"))
        answers = [
            asyncio.create_task(client.generate("import os\n", max_tokens=len(SCRIPT), timeout=20)) for _ in range(8)
        ]
        await until(lambda: verifier.open == 6)  # and two wait for a place
        await until(lambda: verifier.steps > 12)
        began = time.monotonic()
        await old.__aexit__(None, None, None)
        assert time.monotonic() - began < 3.0  # not the five seconds that calls may take
        for answer in await asyncio.gather(*answers):
            assert (answer.text, answer.resumes) == (ANSWER, 1)
            assert answer.usage.steps == len(SCRIPT)  # those before are on record, too


async def test_a_draining_router_sends_moved_and_has_released_the_session_by_then(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.02)
    address = f"127.0.0.1:{free_port()}"
    old = running_router(redis_url, listen=address)
    async with running_router(redis_url) as other, open_channel(address) as channel:
        await old.__aenter__()
        async with announced(verifier, other.registry, MODEL.digest):
            call = InferenceStub(channel).Generate(ask(max_tokens=len(SCRIPT)))
            session_id = (await call.read()).started.session_id
            reader = asyncio.create_task(drain(call))
            await asyncio.sleep(0.05)
            ending = asyncio.create_task(old.__aexit__(None, None, None))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await reader
            assert type(from_rpc_error(caught.value)) is Moved
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            record = await other.sessions.get(session_id)
            assert (record.lease, record.finished) == (0, "")
            await ending
            await until(lambda: verifier.open == 0)


async def test_a_generation_that_begins_during_the_drain_moves_too(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, asked, may_begin = Sessions.begin, asyncio.Event(), asyncio.Event()

    async def late(*arguments: Any, **more: Any) -> Any:
        asked.set()
        await may_begin.wait()
        return await begin(*arguments, **more)

    monkeypatch.setattr(Sessions, "begin", late)
    address, verifier = f"127.0.0.1:{free_port()}", FakeVerifier(SCRIPT, pace_s=0.3)
    old = running_router(redis_url, listen=address, drain_s=10.0)
    async with running_router(redis_url) as other, open_channel(address) as channel:
        await old.__aenter__()
        async with announced(verifier, other.registry, MODEL.digest):
            reader = asyncio.create_task(drain(InferenceStub(channel).Generate(ask(max_tokens=len(SCRIPT)))))
            await asked.wait()
            ending = asyncio.create_task(old.__aexit__(None, None, None))
            await asyncio.sleep(0.2)
            may_begin.set()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(reader, 3)
            assert type(from_rpc_error(caught.value)) is Moved
            assert verifier.steps == 0
            await ending


async def test_any_router_sweeps_abandoned_generations_and_no_others(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "SWEEP_S", 0.2)
    verifier = FakeVerifier(SCRIPT, pace_s=0.05)
    async with (
        running_router(redis_url, lease_s=0.5, resume_ttl_s=0.3) as rig,
        running_router(redis_url, lease_s=0.5, resume_ttl_s=0.3),
        announced(verifier, rig.registry, MODEL.digest),
    ):
        running = rig.stub.Generate(ask(max_tokens=len(SCRIPT)))
        await running.read()
        left = [rig.stub.Generate(ask(max_tokens=50)) for _ in range(5)]
        ids = [(await call.read()).started.session_id for call in left]
        for call in left:
            call.cancel()
        await until(lambda: verifier.open == 1)
        for session_id in ids:
            assert await finished_reason(rig, session_id) == "abandoned"
            again = await rig.stub.GetSession(pb.GetSessionRequest(session_id=session_id))
            assert (again.running, again.reason) == (False, types_pb2.FINISH_REASON_ABANDONED)
        events = await drain(running)
        assert events[-1].finished.reason == types_pb2.FINISH_REASON_LENGTH


async def test_an_owner_that_could_not_reach_redis_for_long_is_not_swept(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.3)
    async with running_router(redis_url, lease_s=0.5) as rig, announced(verifier, rig.registry, MODEL.digest):
        call = rig.stub.Generate(ask(max_tokens=8))
        session_id = (await call.read()).started.session_id
        key = f"outrider:{{{session_id}}}:session"
        await rig.client.hset(key, mapping={"lease": 1, "resumable": 1})  # as after a long outage
        await rig.client.zadd("outrider:{leases}", {session_id: 1})
        seen = await maintenance.sweep_once(rig.sessions, ())
        assert seen == {session_id}
        await call.read()
        assert not await maintenance.sweep_once(rig.sessions, seen)
        assert (await drain(call))[-1].finished.reason == types_pb2.FINISH_REASON_LENGTH


async def test_routers_share_a_verifiers_slots_and_refuse_no_request(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.01)
    verifier.slots = 2
    async with (
        running_router(redis_url) as one,
        running_router(redis_url) as other,
        announced(verifier, one.registry, MODEL.digest),  # it announces eight slots
    ):
        calls = [collect(rig.stub.Generate(ask(max_tokens=6), timeout=20)) for rig in (one, other) for _ in range(6)]
        for _, chunks, finished in await asyncio.gather(*calls):
            assert [token for chunk in chunks for token in chunk.token_ids] == SCRIPT[:6]
            assert finished.reason == types_pb2.FINISH_REASON_LENGTH
    assert verifier.most == 2
