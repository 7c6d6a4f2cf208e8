"""The verifiers of a router: full, silent, dead, or out of reach of Redis."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, suppress

import grpc
import grpc.aio
import pytest

from outrider.v1 import inference_pb2 as pb
from outrider.v1 import verifier_pb2
from router.sessions.decode_attempts import MAX_FAILURES
from router.sessions.maintenance import REFRESH_S
from tests.router.fakes import FakeStream, FakeVerifier, announced
from tests.router.rig import (
    ANSWER,
    FOLDER,
    MODEL,
    SCRIPT,
    ask,
    collect,
    drain,
    finished_reason,
    released,
    running_router,
)


async def test_a_dead_verifiers_session_continues_at_another_one(redis_url: str) -> None:
    dying, steady = FakeVerifier(SCRIPT, pace_s=0.02), FakeVerifier(SCRIPT, pace_s=0.02)
    async with running_router(redis_url) as rig, AsyncExitStack() as stack:
        async with announced(dying, rig.registry, MODEL.digest):
            moved = rig.stub.Generate(ask(max_tokens=len(SCRIPT)))
            session_id = (await moved.read()).started.session_id
            await moved.read()
            await stack.enter_async_context(announced(steady, rig.registry, MODEL.digest))
            spared = rig.stub.Generate(ask(max_tokens=10))
            await spared.read()
            assert (dying.open, steady.open) == (1, 1)
        tail = await drain(moved)
        assert tail[-1].finished.usage.completion_tokens == len(SCRIPT)
        log = await rig.sessions.read(session_id)
        assert list(log.tokens[-len(SCRIPT) :]) == SCRIPT
        again = steady.starts[-1]
        assert (again.epoch, len(again.tokens) > again.answer_position) == (2, True)
        assert (await drain(spared))[-1].finished.usage.completion_tokens == 10
        # The dead one is still listed; the next generation passes it over.
        _, _, finished = await collect(rig.stub.Generate(ask(max_tokens=4)))
        assert finished.usage.completion_tokens == 4


@pytest.mark.parametrize("script", [SCRIPT[:9], [*SCRIPT[:4], 0, *SCRIPT[4:]]], ids=["length", "stop"])
async def test_a_verifier_that_dies_before_sending_the_end_adds_no_tokens(redis_url: str, script: list[int]) -> None:
    dying, steady = FakeVerifier(script), FakeVerifier(script)
    dying.dies_at_the_end = True
    async with (
        running_router(redis_url) as rig,
        announced(dying, rig.registry, MODEL.digest),
        announced(steady, rig.registry, MODEL.digest, sessions=5),
    ):
        _, chunks, _ = await collect(rig.stub.Generate(ask(max_tokens=9)))
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        assert tokens == script[: script.index(0) + 1 if 0 in script else 9]
        assert not steady.starts


async def test_a_verifier_that_falls_silent_is_taken_for_dead(redis_url: str) -> None:
    frozen, steady = FakeVerifier(SCRIPT), FakeVerifier(SCRIPT)
    frozen.silent, frozen.pace_s = True, 60
    async with (
        running_router(redis_url) as rig,
        announced(frozen, rig.registry, MODEL.digest),
        announced(steady, rig.registry, MODEL.digest, sessions=5),
    ):
        began = time.monotonic()
        started, _, _ = await collect(rig.stub.Generate(ask(max_tokens=4)))
        assert 2.0 < time.monotonic() - began < 4.0
        assert (await rig.sessions.get(started.session_id)).epoch == 2


async def test_a_request_that_stalls_verifiers_reaches_at_most_three(redis_url: str) -> None:
    verifiers = [FakeVerifier(SCRIPT) for _ in range(4)]
    for verifier in verifiers:
        verifier.silent, verifier.pace_s = True, 60
    async with running_router(redis_url) as rig, AsyncExitStack() as stack:
        for sessions, verifier in enumerate(verifiers):
            await stack.enter_async_context(announced(verifier, rig.registry, MODEL.digest, sessions=sessions))
        call = rig.stub.Generate(ask(max_tokens=4))
        session_id = (await call.read()).started.session_id
        with pytest.raises(grpc.aio.AioRpcError, match="stood still one after the other") as caught:
            await drain(call)
        assert caught.value.code() == grpc.StatusCode.INTERNAL
        assert [len(verifier.starts) for verifier in verifiers] == [1, 1, 1, 0]
        await asyncio.sleep(0.2)
        assert (await rig.sessions.get(session_id)).finished  # nobody resumes it


async def test_verifiers_that_die_do_not_count_as_standing_still(redis_url: str) -> None:
    silent, dying, steady = FakeVerifier(SCRIPT), FakeVerifier(SCRIPT, pace_s=0.02), FakeVerifier(SCRIPT)
    silent.silent, silent.pace_s = True, 60
    async with running_router(redis_url) as rig, AsyncExitStack() as stack:
        await stack.enter_async_context(announced(silent, rig.registry, MODEL.digest))
        async with announced(dying, rig.registry, MODEL.digest, sessions=1):
            call = rig.stub.Generate(ask(max_tokens=len(SCRIPT)))
            await call.read()
            assert (await call.read()).WhichOneof("event") == "chunk"
            await stack.enter_async_context(announced(steady, rig.registry, MODEL.digest))
        tail = await drain(call)
        assert tail[-1].finished.usage.completion_tokens == len(SCRIPT)


async def test_a_client_without_verifiers_gets_the_error_and_can_resume(redis_url: str) -> None:
    first, second = FakeVerifier(SCRIPT, pace_s=0.02), FakeVerifier(SCRIPT)
    async with running_router(redis_url, failover_wait_s=0.2) as rig:
        async with announced(first, rig.registry, MODEL.digest) as worker:
            call = rig.stub.Generate(ask(max_tokens=len(SCRIPT)))
            session_id = (await call.read()).started.session_id
            chunk = (await call.read()).chunk
        await rig.registry.withdraw(worker)
        events: list[pb.GenerateResponse] = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await drain(call, events)
        chunk = events[-1].chunk if events else chunk
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        await released(rig, session_id)
        async with announced(second, rig.registry, MODEL.digest):
            rest = pb.ResumeRequest(
                session_id=session_id, next_position=chunk.next_position, text_offset=chunk.text_offset
            )
            _, chunks, _ = await collect(rig.stub.Resume(rest))
            assert ANSWER[: chunk.text_offset] + "".join(part.text for part in chunks) == ANSWER


@pytest.mark.parametrize("announced_on", [False, True], ids=["withdrawn", "still-listed"])
async def test_an_answer_waits_without_a_slot_for_its_only_verifier_to_come_back(
    redis_url: str, announced_on: bool
) -> None:
    first, second, other = FakeVerifier(SCRIPT, pace_s=0.02), FakeVerifier(SCRIPT), FakeVerifier(SCRIPT)
    models = {"target": FOLDER, "other": FOLDER}
    async with running_router(redis_url, models=models, max_sessions=1, lease_s=1.0) as rig:
        async with announced(first, rig.registry, MODEL.digest) as worker:
            request = ask(max_tokens=len(SCRIPT))
            request.model = "target"
            call = rig.stub.Generate(request)
            session_id = (await call.read()).started.session_id
            events = [await call.read()]
        if not announced_on:
            await rig.registry.withdraw(worker)
        waiting = asyncio.create_task(drain(call, events))
        async with announced(other, rig.registry, MODEL.digest, model="other"):
            await asyncio.sleep(2 * REFRESH_S + 1.2)  # longer than the lease, which the wait renews
            request = ask(max_tokens=2)
            request.model = "other"
            await collect(rig.stub.Generate(request))
        assert not waiting.done()
        async with announced(second, rig.registry, MODEL.digest):
            await waiting
        assert "".join(event.chunk.text for event in events) == ANSWER
        assert len(second.starts) == 1
        assert (await rig.sessions.get(session_id)).finished


async def test_an_answer_that_kills_its_verifiers_when_they_are_sent_it_is_sent_four_times(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT)
    verifier.dies_of = 3
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await drain(rig.stub.Generate(ask(max_tokens=9)))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert len(verifier.starts) == MAX_FAILURES


async def test_an_answer_that_waits_for_a_verifier_ends_with_its_deadline_or_its_caller(redis_url: str) -> None:
    async with running_router(redis_url) as rig:
        async with announced(FakeVerifier(SCRIPT, pace_s=0.02), rig.registry, MODEL.digest) as worker:
            late, left = (rig.stub.Generate(ask(max_tokens=60), timeout=timeout) for timeout in (1.5, None))
            sessions = [(await call.read()).started.session_id for call in (late, left)]
            for call in (late, left):
                await call.read()
        await rig.registry.withdraw(worker)
        await asyncio.sleep(0.5)
        left.cancel()
        await released(rig, sessions[1])
        assert not (await rig.sessions.get(sessions[1])).finished
        with suppress(grpc.aio.AioRpcError):
            await drain(late)
        assert await finished_reason(rig, sessions[0]) == "deadline"


async def test_a_full_verifier_is_passed_over_and_all_full_is_overload(redis_url: str) -> None:
    full, free = FakeVerifier(SCRIPT), FakeVerifier(SCRIPT)
    full.full = True
    async with (
        running_router(redis_url, queue=0) as rig,
        announced(full, rig.registry, MODEL.digest),
        announced(free, rig.registry, MODEL.digest, sessions=5) as second,
    ):
        started, _, _ = await collect(rig.stub.Generate(ask(max_tokens=2)))
        assert (await rig.sessions.get(started.session_id)).verifier == second.worker_id
        free.full = True
        with pytest.raises(grpc.aio.AioRpcError, match="all slots") as caught:
            await collect(rig.stub.Generate(ask(max_tokens=2)))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_verifier_missing_from_redis_is_used_while_it_serves(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.02)
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest) as worker:
        first = rig.stub.Generate(ask(max_tokens=40))
        await first.read()
        await rig.registry.withdraw(worker)  # as when its entry expires
        await asyncio.sleep(2 * REFRESH_S)
        await collect(rig.stub.Generate(ask(max_tokens=3)))
        await drain(first)
        with pytest.raises(grpc.aio.AioRpcError, match="no verifier serves"):
            await collect(rig.stub.Generate(ask(max_tokens=3)))


class Confused(FakeVerifier):
    """Takes a start for another one."""

    def __init__(self, stride: int, changes: dict[str, int]) -> None:
        super().__init__(SCRIPT, stride=stride)
        self._changes = changes

    async def run_script(self, start: verifier_pb2.DecodeStart, stream: FakeStream) -> None:
        other = verifier_pb2.DecodeStart()
        other.CopyFrom(start)
        for name, value in self._changes.items():
            setattr(other, name, value)
        await super().run_script(other, stream)


@pytest.mark.parametrize(
    ("stride", "changes", "why"),
    [(1, {"epoch": 0}, "committed under epoch 0"), (8, {"window": 64}, "more than 4 tokens beyond")],
)
async def test_a_verifier_that_commits_for_another_owner_or_beyond_the_window_is_given_up(
    redis_url: str, stride: int, changes: dict[str, int], why: str
) -> None:
    async with (
        running_router(redis_url, window=4) as rig,
        announced(Confused(stride, changes), rig.registry, MODEL.digest),
    ):
        events: list[pb.GenerateResponse] = []
        with pytest.raises(grpc.aio.AioRpcError, match=why) as caught:
            await drain(rig.stub.Generate(ask(max_tokens=len(SCRIPT))), events)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert [event.WhichOneof("event") for event in events] == ["started"]
        started = events[0].started
        assert len((await rig.sessions.read(started.session_id)).tokens) == started.prompt_tokens
