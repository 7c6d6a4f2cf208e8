"""What a router is sent in one message of Decode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from outrider.core.sampling.sampler import Choice
from outrider.core.session.contract import StepReport
from outrider.rpc.liveness import WorkClock
from outrider.v1 import verifier_pb2 as pb
from verifier_svc.commit_queue import CommitQueue, StepCommit
from verifier_svc.router_stream import RouterStream

COMMITS = {1: 1000, 2: 500, 3: 1}  # of each generation, by its handle


class Opener:
    """Opens sessions that have committed all of their tokens."""

    async def open_session(self, start: pb.DecodeStart) -> Any:
        commits, last = CommitQueue(0, 4096), COMMITS[start.handle] - 1
        for position in range(last + 1):
            commits.put_nowait(StepCommit(position, [Choice(7, 1.0)], 0, StepReport(), last=position == last))
        parts: dict[str, Any] = {"kv_slot": SimpleNamespace(cached=0), "terms": SimpleNamespace(resting=False)}
        contract = SimpleNamespace(stop_ids=())
        return SimpleNamespace(commits=commits, tokens=[7], epoch=1, contract=contract, **parts)

    def replan(self, session: object, plan: object) -> None:
        raise AssertionError("no plan has changed")

    def attributes(self, session: object) -> dict[str, Any]:
        return {}


async def test_a_message_has_at_most_1024_commits_and_the_next_one_has_the_rest() -> None:
    sessions = SimpleNamespace(draining=False, close=lambda session: None)
    scheduler = SimpleNamespace(sessions=sessions, progress=WorkClock())
    messages: list[pb.DecodeResponse] = []
    all_sent = asyncio.Event()

    async def requests() -> AsyncIterator[pb.DecodeRequest]:
        for handle in COMMITS:
            yield pb.DecodeRequest(start=pb.DecodeStart(handle=handle, lease_ms=10_000))
        await all_sent.wait()

    async def send(message: pb.DecodeResponse) -> None:
        if not message.HasField("heartbeat"):
            messages.append(message)
        if sum(len(message.ended) for message in messages) == len(COMMITS):
            all_sent.set()

    async with asyncio.timeout(10):
        await RouterStream(Opener(), scheduler).run(requests(), send)  # type: ignore[arg-type]
    assert [len(message.commits) for message in messages] == [1024, 477]
    assert [[ended.handle for ended in message.ended] for message in messages] == [[1], [2, 3]]
    commits = [commit for message in messages for commit in message.commits]
    assert [(commit.handle, commit.position) for commit in commits] == [
        (handle, position) for handle, count in COMMITS.items() for position in range(count)
    ]
