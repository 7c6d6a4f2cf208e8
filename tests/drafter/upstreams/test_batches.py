"""Deltas that are queued together go to an upstream in one message, if it takes that, and in their order."""

from __future__ import annotations

import pytest

from drafter_svc.upstreams import upstream as upstreams
from drafter_svc.upstreams.upstream import Upstream
from outrider.v1 import drafter_pb2 as pb
from tests.drafter.test_renewals import Rig


def queue(upstream: Upstream, *numbers: int) -> None:
    for number in numbers:
        upstream._queue(pb.TreeDelta(attachment=number, tokens=[1, 2, 3]))


async def sent(upstream: Upstream) -> list[str | list[int]]:
    """The messages that go out: a frame's kind, or the attachments of deltas."""
    found: list[str | list[int]] = []
    while upstream._outgoing:
        message = await upstream._next()
        found.append([delta.attachment for delta in message.deltas] or (message.WhichOneof("frame") or ""))
    return found


async def test_deltas_go_out_together_in_their_order() -> None:
    rig = Rig()
    rig.upstream._receive(pb.DraftDown(welcome=pb.Welcome(batches=True)))
    queue(rig.upstream, 1, 2, 1)
    rig.upstream.detach(rig.attachment)
    queue(rig.upstream, 4)
    assert await sent(rig.upstream) == ["subscribe", [1, 2, 1], "unsubscribe", "delta"]
    await rig.upstream.close()


async def test_an_upstream_that_does_not_take_it_gets_each_alone() -> None:
    rig = Rig()
    rig.upstream._receive(pb.DraftDown(welcome=pb.Welcome()))
    queue(rig.upstream, 1, 2)
    assert await sent(rig.upstream) == ["subscribe", "delta", "delta"]
    await rig.upstream.close()


async def test_a_message_of_deltas_ends_where_it_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstreams, "BATCH_BYTES", 10)
    rig = Rig()
    rig.upstream._receive(pb.DraftDown(welcome=pb.Welcome(batches=True)))
    queue(rig.upstream, 1, 2, 3, 4, 5)
    assert await sent(rig.upstream) == ["subscribe", [1, 2], [3, 4], "delta"]
    await rig.upstream.close()


async def test_a_message_has_1024_deltas_and_no_more() -> None:
    rig = Rig()
    rig.upstream._receive(pb.DraftDown(welcome=pb.Welcome(batches=True)))
    queue(rig.upstream, *range(1, 1500))
    frames = await sent(rig.upstream)
    assert [frame if isinstance(frame, str) else len(frame) for frame in frames] == ["subscribe", 1024, 475]
    await rig.upstream.close()


async def test_commits_of_several_sessions_are_each_taken() -> None:
    rig = Rig()
    number = rig.attachment.number
    commits = [pb.Commit(attachment=one, epoch=1, position=0, tokens=[99]) for one in (number, 99)]
    rig.upstream._receive(pb.DraftDown(commits=commits))
    assert rig.refused == 2  # a token outside the vocabulary, and an attachment that is not known
    assert rig.attachment.number == number + 1  # subscribed anew
    await rig.upstream.close()
