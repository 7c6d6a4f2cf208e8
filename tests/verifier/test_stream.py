"""What a drafter is sent: commits first and coalesced; bounded however slowly it reads."""

import asyncio
from collections.abc import Iterator

import pytest

from outrider.core.tree.committed_window import ALIAS_SPAN
from outrider.errors import Overloaded
from outrider.upstream import outbox
from outrider.upstream.outbox import CONTROL_FRAMES
from outrider.upstream.upstream_session import UpstreamStream
from outrider.v1 import drafter_pb2 as pb
from outrider.v1 import types_pb2


def stream() -> UpstreamStream:
    return UpstreamStream("d", lambda: types_pb2.Heartbeat(steps=5))


def commit(attachment: int, position: int, count: int = 1) -> pb.Commit:
    tokens = range(position, position + count)
    return pb.Commit(attachment=attachment, epoch=1, position=position, tokens=tokens, min_path_score=position / 100)


def parts(count: int) -> Iterator[pb.Snapshot]:
    for number in range(count):
        yield pb.Snapshot(attachment=1, position=number, last=number == count - 1)


async def kinds(outgoing: UpstreamStream, count: int) -> list[str]:
    found = []
    for _ in range(count):
        frame = await outgoing.next()
        assert frame is not None
        found.append(frame.WhichOneof("frame") or "")
    return found


async def test_commits_are_sent_before_control_frames_and_snapshots() -> None:
    outgoing = stream()
    outgoing.snapshot(1, lambda: parts(2))
    outgoing.queue_control(pb.DraftDown(welcome=pb.Welcome()))
    outgoing.commit(commit(2, 10))
    assert await kinds(outgoing, 4) == ["commit", "welcome", "snapshot", "snapshot"]


async def test_commits_of_several_sessions_share_a_message_if_the_drafter_supports_it() -> None:
    outgoing = stream()
    outgoing.batches = True
    for attachment in (1, 2, 3, 4):
        outgoing.commit(commit(attachment, 10))
    outgoing.snapshot(2, lambda: parts(1))
    outgoing.hold(3, held=True)
    frame = await outgoing.next()
    assert frame is not None
    assert [one.attachment for one in frame.commits] == [1, 4]
    outgoing.commit(commit(1, 11))
    outgoing.hold(3, held=False)
    frame = await outgoing.next()
    assert frame is not None
    assert [(one.attachment, one.position) for one in frame.commits] == [(3, 10), (1, 11)]
    outgoing.commit(commit(1, 12))
    assert await kinds(outgoing, 2) == ["commit", "snapshot"]  # one alone is a frame


async def test_a_drafter_without_batches_gets_each_commit_alone() -> None:
    outgoing = stream()
    for attachment in (1, 2):
        outgoing.commit(commit(attachment, 10))
    assert await kinds(outgoing, 2) == ["commit", "commit"]


async def test_a_message_of_commits_ends_at_its_byte_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "BATCH_BYTES", 150)
    outgoing = stream()
    outgoing.batches = True
    for attachment in range(1, 6):
        outgoing.commit(commit(attachment, 10, 60))
    counts = []
    for _ in range(2):
        frame = await outgoing.next()
        assert frame is not None
        counts.append(len(frame.commits))
    assert counts == [3, 2]


async def test_a_message_has_1024_commits_and_no_more() -> None:
    outgoing = stream()
    outgoing.batches = True
    for attachment in range(1, 1500):
        outgoing.commit(pb.Commit(attachment=attachment))
    counts = []
    for _ in range(2):
        frame = await outgoing.next()
        assert frame is not None
        counts.append(len(frame.commits))
    assert counts == [1024, 475]


async def test_commits_of_one_session_coalesce() -> None:
    outgoing = stream()
    outgoing.commit(commit(1, 10, 2))
    second = commit(1, 12)
    second.dropped.append(4)
    second.digest, second.credit, second.time_cost_tokens_per_s, second.ahead = 12, 40, 2.0, True
    outgoing.commit(second)
    frame = await outgoing.next()
    assert frame is not None
    assert (frame.commit.position, list(frame.commit.tokens)) == (10, [10, 11, 12])
    assert (list(frame.commit.dropped), round(frame.commit.min_path_score, 2)) == ([4], 0.12)
    assert (frame.commit.digest, frame.commit.credit) == (12, 40)
    assert (frame.commit.time_cost_tokens_per_s, frame.commit.ahead) == (2.0, True)


async def test_a_commit_during_a_snapshot_waits_for_its_last_part_and_others_do_not() -> None:
    outgoing = stream()
    outgoing.snapshot(1, lambda: parts(3))
    outgoing.commit(commit(1, 5))  # the snapshot will hold it
    assert await kinds(outgoing, 1) == ["snapshot"]
    outgoing.commit(commit(1, 6))
    outgoing.commit(commit(2, 6))
    assert await kinds(outgoing, 4) == ["commit", "snapshot", "snapshot", "commit"]


async def test_a_lagging_drafter_gets_a_new_snapshot_when_it_reads() -> None:
    outgoing = stream()
    position = 0
    while position <= ALIAS_SPAN and outgoing.commit(commit(1, position)):
        position += 1
    assert position == ALIAS_SPAN
    made = []

    def begin() -> Iterator[pb.Snapshot]:
        made.append(position)
        return parts(1)

    for _ in range(3):
        outgoing.snapshot(1, begin)
    for _ in range(10_000):
        assert outgoing.commit(commit(1, position))
        position += 1
    assert await kinds(outgoing, 1) == ["snapshot"]
    assert made == [position]


async def test_a_drafter_that_never_reads_does_not_fill_the_memory() -> None:
    outgoing = stream()
    for number in range(CONTROL_FRAMES + 1):
        outgoing.close(number, "unknown session")
    with pytest.raises(Overloaded, match="does not read"):
        outgoing.check()


async def test_a_closed_session_sends_nothing_more() -> None:
    outgoing = stream()
    outgoing.commit(commit(1, 5))
    outgoing.snapshot(2, lambda: parts(1))
    outgoing.close(1, "finished")
    outgoing.close(2, "finished")
    assert await kinds(outgoing, 2) == ["closed", "closed"]


async def test_an_idle_stream_sends_its_progress_in_heartbeats() -> None:
    outgoing = stream()
    frame = await asyncio.wait_for(outgoing.next(), 2)
    assert frame is not None
    assert frame.heartbeat.steps == 5
    outgoing.end()
    assert await outgoing.next() is None


async def test_held_commits_join_and_go_out_when_released() -> None:
    outgoing = stream()
    outgoing.hold(1, True)
    assert outgoing.commit(commit(1, 10, 2))
    assert outgoing.commit(commit(1, 12))
    assert outgoing.commit(commit(2, 10))
    frame = await outgoing.next()
    assert frame is not None
    assert frame.commit.attachment == 2
    assert await kinds(outgoing, 1) == ["heartbeat"]
    outgoing.hold(1, False)
    frame = await outgoing.next()
    assert frame is not None
    assert list(frame.commit.tokens) == [10, 11, 12]
