"""Watching sessions: one stream from the verifier for each, bounds for watchers, and few reads for an idle session."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.v1 import inference_pb2 as pb
from outrider.v1 import types_pb2, verifier_pb2
from router.reporting import step_stream
from tests.router.fakes import FakeVerifier, announced
from tests.router.rig import MODEL, SCRIPT, Rig, collect, running_router, until


class Watched(FakeVerifier):
    """Sends a step every few milliseconds to whoever watches a session that decodes."""

    def __init__(self, pace_s: float = 0.2) -> None:
        super().__init__(SCRIPT, pace_s=pace_s)
        self.watches = 0
        self.watching = 0

    async def Watch(self, request: verifier_pb2.WatchRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if not self.open:
            await context.abort(grpc.StatusCode.NOT_FOUND, "does not decode here")
        self.watches += 1
        self.watching += 1
        try:
            position = 0
            while self.open:
                await context.write(types_pb2.StepTree(position=position, tokens=SCRIPT[:1], committed=SCRIPT[:1]))
                position += 1
                await asyncio.sleep(0.002)
        finally:
            self.watching -= 1


def watch(rig: Rig, session_id: str) -> Any:
    return rig.stub.Watch(pb.WatchSessionRequest(session_id=session_id))


def generate(rig: Rig, session_id: str) -> asyncio.Task[Any]:
    request = pb.GenerateRequest(session_id=session_id, text="import os\n", sampling=pb.Sampling(max_tokens=60))
    return asyncio.create_task(collect(rig.stub.Generate(request)))


async def test_all_watchers_of_a_session_have_one_stream_of_its_verifier(redis_url: str) -> None:
    verifier = Watched()
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        session_id = (await rig.stub.CreateSession(pb.CreateSessionRequest())).session_id
        calls = [watch(rig, session_id) for _ in range(20)]
        generating = generate(rig, session_id)
        steps = [[await call.read() for _ in range(5)] for call in calls]
        assert (verifier.watches, verifier.watching) == (1, 1)
        for seen in steps:
            positions = [step.position for step in seen]
            assert positions == list(range(positions[0], positions[0] + 5))
            assert all(list(step.texts) == list(step.committed_texts) == [MODEL.token_text(SCRIPT[0])] for step in seen)
        for call in calls:
            call.cancel()
        await until(lambda: not verifier.watching)
        await rig.stub.CloseSession(pb.CloseSessionRequest(session_id=session_id))
        await generating


async def test_an_idle_session_is_not_looked_for_and_its_next_steps_come_at_once(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, read = [0], step_stream.open_record

    async def counted(*arguments: Any) -> Any:
        reads[0] += 1
        return await read(*arguments)

    monkeypatch.setattr(step_stream, "open_record", counted)
    monkeypatch.setattr(step_stream, "FIRST_WAIT_S", 0.02)
    monkeypatch.setattr(step_stream, "LONGEST_WAIT_S", 1000.0)
    verifier = Watched(0.01)  # its answer ends before the next look, which would come after 2.54 s
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        session_id = (await rig.stub.CreateSession(pb.CreateSessionRequest())).session_id
        call = watch(rig, session_id)
        reading = asyncio.create_task(call.read())
        await asyncio.sleep(1.4)
        assert reads[0] <= 8  # one for the watcher, and those of pauses that double
        generating = generate(rig, session_id)
        step = await asyncio.wait_for(reading, 20)
        assert list(step.committed) == SCRIPT[:1]
        await rig.stub.CloseSession(pb.CloseSessionRequest(session_id=session_id))
        await generating


async def test_a_tenant_has_so_many_watchers_and_no_more(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_stream, "MAX_OF_TENANT", 3)
    async with running_router(redis_url) as rig, announced(Watched(), rig.registry, MODEL.digest):
        session_id = (await rig.stub.CreateSession(pb.CreateSessionRequest())).session_id
        calls = [watch(rig, session_id) for _ in range(3)]
        refused: list[str] = []

        async def all_are_watching() -> None:
            while not refused:
                call = watch(rig, session_id)
                try:
                    await asyncio.wait_for(call.read(), 0.1)
                except TimeoutError:
                    call.cancel()
                except grpc.aio.AioRpcError as error:
                    refused.append(f"{error.code().name}: {error.details()}")

        await asyncio.wait_for(all_are_watching(), 10)
        assert refused[0].startswith("RESOURCE_EXHAUSTED: too many sessions are watched here (at most 3 of a tenant")
        calls.pop().cancel()
        await asyncio.sleep(0.2)
        another = watch(rig, session_id)
        with pytest.raises(TimeoutError):  # it waits for steps
            await asyncio.wait_for(another.read(), 0.2)
