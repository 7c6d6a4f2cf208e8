"""Watching sessions: one stream from the verifier for each, bounds for watchers, and few reads for an idle session."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.store.sessions import Sessions
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


def generate(rig: Rig, session_id: str, tokens: int = 60) -> asyncio.Task[Any]:
    request = pb.GenerateRequest(session_id=session_id, text="import os\n", sampling=pb.Sampling(max_tokens=tokens))
    return asyncio.create_task(collect(rig.stub.Generate(request)))


async def test_all_watchers_of_a_session_share_one_verifier_stream(redis_url: str) -> None:
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


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sessions whose records are read for watchers, where only events and few looks at first lead to steps."""
    reads, read = [], step_stream.open_record

    async def counted(sessions: Sessions, tenant: str, session_id: str) -> Any:
        reads.append(session_id)
        return await read(sessions, tenant, session_id)

    monkeypatch.setattr(step_stream, "open_record", counted)
    monkeypatch.setattr(step_stream, "FIRST_WAIT_S", 0.02)
    monkeypatch.setattr(step_stream, "LONGEST_WAIT_S", 1000.0)
    return reads


async def test_a_watched_idle_session_shows_its_steps_at_once_from_any_router(redis_url: str, reads: list[str]) -> None:
    verifier = Watched(0.01)  # its answer ends before the next look, which would come after 2.54 s
    async with (
        running_router(redis_url) as rig,
        running_router(redis_url) as other,
        announced(verifier, rig.registry, MODEL.digest),
    ):
        session_id = (await rig.stub.CreateSession(pb.CreateSessionRequest())).session_id
        steps: list[types_pb2.StepTree] = []
        call = watch(rig, session_id)

        async def read() -> None:
            while True:
                steps.append(await call.read())

        reading = asyncio.create_task(read())
        for beginning in (rig, other):
            await asyncio.sleep(1.4)
            assert len(reads) <= 10  # one for the watcher, one once events come, and those of pauses that double
            assert not steps
            await generate(beginning, session_id, 20)
            await until(lambda: bool(steps))
            await until(lambda: not verifier.watching)
            reads.clear()
            steps.clear()
        await other.stub.CloseSession(pb.CloseSessionRequest(session_id=session_id))
        with pytest.raises(grpc.aio.AioRpcError, match="is closed"):
            await asyncio.wait_for(reading, 1)


async def test_a_tenants_watchers_are_bounded(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
