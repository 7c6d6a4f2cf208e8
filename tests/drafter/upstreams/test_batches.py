"""Deltas that are queued together go to an upstream in one message, if it takes that, and in their order."""

from __future__ import annotations

import pytest

from drafter_svc.upstreams import outgoing
from drafter_svc.upstreams.upstream import Attachment
from outrider.core.tree.delta import Delta
from outrider.v1 import drafter_pb2 as pb
from outrider.wire.drafter import delta_to_pb
from tests.drafter.test_renewals import Rig, rig

__all__ = ["rig"]
DELTA = Delta(0, 0, 1, (0, 1, 2), (1, 2, 3), (-0.5,) * 3)
SUBSCRIBED = "subscribe"


def queue(rig: Rig, *numbers: int) -> None:
    for number in numbers:
        rig.upstream.send(Attachment("s", "", 1, b"", number), DELTA, 1, False)


async def welcome(rig: Rig, *, batches: bool) -> None:
    await rig.stream.receive(pb.DraftDown(welcome=pb.Welcome(batches=batches)))


async def test_deltas_are_sent_together_in_order(rig: Rig) -> None:
    await welcome(rig, batches=True)
    queue(rig, 1, 2, 1)
    rig.upstream.detach(rig.attachment)
    queue(rig, 4)
    await rig.stream.settle()
    assert rig.sent == [SUBSCRIBED, [1, 2, 1], "unsubscribe", "delta"]


async def test_an_upstream_that_takes_no_batches_gets_each_delta_alone(rig: Rig) -> None:
    await welcome(rig, batches=False)
    queue(rig, 1, 2)
    await rig.stream.settle()
    assert rig.sent == [SUBSCRIBED, "delta", "delta"]


async def test_a_message_of_deltas_ends_at_its_byte_limit(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    delta = delta_to_pb(DELTA, attachment=1, epoch=1, plan_version=1, exhausted=False)
    monkeypatch.setattr(outgoing, "BATCH_BYTES", delta.ByteSize())
    await welcome(rig, batches=True)
    queue(rig, 1, 2, 3, 4, 5)
    await rig.stream.settle()
    assert rig.sent == [SUBSCRIBED, [1, 2], [3, 4], "delta"]


async def test_a_message_has_at_most_1024_deltas(rig: Rig) -> None:
    await welcome(rig, batches=True)
    queue(rig, *range(1, 1500))
    await rig.stream.settle()
    assert [frame if isinstance(frame, str) else len(frame) for frame in rig.sent] == [SUBSCRIBED, 1024, 475]


async def test_each_of_several_sessions_commits_in_one_message_is_received(rig: Rig) -> None:
    number = rig.attachment.number
    commits = [pb.Commit(attachment=one, epoch=1, position=0, tokens=[99]) for one in (number, 99)]
    await rig.stream.receive(pb.DraftDown(commits=commits))
    assert rig.refused == 2  # a token outside the vocabulary, and an attachment that is not known
    assert rig.attachment.number == number + 1  # subscribed anew
