"""What a router is sent in one message of Decode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from outrider.core.sampling.sampler import Choice
from outrider.core.session.contract import StepReport
from outrider.v1 import verifier_pb2 as pb
from verifier_svc.commit_queue import CommitQueue, StepCommit
from verifier_svc.router_stream import RouterStream, _Generation


def generation(handle: int, commits: int) -> Any:
    """One whose router has not read `commits` commits; the last one ends it."""
    queue = CommitQueue(0, 4096)
    for position in range(commits):
        queue.put_nowait(StepCommit(position, [Choice(7, 1.0)], 0, StepReport(), last=position == commits - 1))
    made = _Generation(pb.DecodeStart(handle=handle))
    contract = SimpleNamespace(stop_ids=())
    made.session = SimpleNamespace(commits=queue, tokens=[7], epoch=1, contract=contract)  # type: ignore[assignment]
    return made


async def test_a_message_has_1024_commits_and_the_rest_follows_in_order() -> None:
    stream = RouterStream(SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    for handle, count in ((1, 1000), (2, 500), (3, 1)):
        stream._mark(generation(handle, count))
    messages = [stream._take(), stream._take()]
    assert [len(message.commits) for message in messages] == [1024, 477]
    assert [[ended.handle for ended in message.ended] for message in messages] == [[1], [2, 3]]
    commits = [commit for message in messages for commit in message.commits]
    assert [(commit.handle, commit.position) for commit in commits] == [
        *((1, position) for position in range(1000)),
        *((2, position) for position in range(500)),
        (3, 0),
    ]
    assert not stream._changed
