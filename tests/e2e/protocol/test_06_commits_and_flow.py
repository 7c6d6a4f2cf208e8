"""6. Commits and flow."""

import asyncio
import math
import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from outrider.core.session.contract import Plan, PlanOverlap
from outrider.core.session.digest import EMPTY, extend
from outrider.fleet.cluster import LocalCluster
from outrider.rpc.channels import open_channel
from outrider.v1 import types_pb2
from outrider.v1.drafter_pb2_grpc import DrafterStub
from outrider.wire.types import plan_to_pb
from tests.e2e.mini_router import SPECULATE, described
from tests.e2e.protocol.conftest import Text
from tests.e2e.protocol.peers import decoding, delta, drafting, hello_to
from tests.e2e.protocol.stream_probe import new_name
from tests.e2e.protocol.upstreams import Copy, Stream, upstream_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

# The values of docs/protocol.md.
ALIAS_SPAN = 256
TREE_CAPACITY = 512
CONTROL_FRAMES = 4096

FILLING = 1500  # refusals: more than a connection holds for a drafter that does not read
NARROW = (("grpc.http2.lookahead_bytes", 64), ("grpc.http2.bdp_probe", 0))  # a drafter that reads hardly ahead
WIDE = plan_to_pb(Plan(version=1, depth=8, width=4, nodes=16, wait_us=0, overlap=PlanOverlap.ALWAYS))


async def test_a_commit_moves_the_root_and_keeps_the_nodes_below_its_path(verifier: str, text: Text) -> None:
    async with (
        decoding(verifier, tokens=text.prompt, contract=text.contract, plan=WIDE, window=4) as router,
        drafting(verifier) as drafter,
    ):
        await router.full()
        await drafter.attach(router.session)
        drafter.send_frame(**delta(text.whole, len(text.prompt) + 3, text.answer[4:24]))  # once for all
        await drafter.received_all(router.session)
        for _ in range(4):
            report = await router.step()
            assert 0 < report.accepted == report.verified <= 3
        assert router.tokens == text.whole[: len(router.tokens)]


async def test_deltas_and_commits_of_several_sessions_share_messages_if_both_sides_support_it(
    verifier: str, text: Text
) -> None:
    opening = {"tokens": text.prompt, "contract": text.contract, "plan": WIDE, "window": 4}
    name = new_name("drafter")
    async with (
        decoding(verifier, **opening) as one,
        decoding(verifier, **opening) as other,
        decoding(verifier, **opening) as third,
        drafting(verifier, name, greets=False) as drafter,
    ):
        drafter.send_frame(hello=await hello_to(verifier, name, batches=True))
        assert (await drafter.inbox.take("welcome")).batches
        for router in (one, other, third):
            await router.full()
            await drafter.attach(router.session)
        fields = [
            delta(text.whole, len(text.prompt) + 3, text.answer[4:24], attachment=attachment)["delta"]
            for attachment in (1, 2, 3)
        ]
        fields[1].tokens[0] = 4096  # this ends this attachment alone
        drafter.send_frame(deltas=fields)
        assert (await drafter.inbox.take("closed", 2)).reason.startswith("malformed: tokens")
        await drafter.received_all(one.session)
        for router in (one, third):
            assert (await router.step()).accepted > 0
        for attachment in (1, 3):
            await drafter.inbox.take("commit", attachment)
        assert (await other.step()).accepted == 0


async def test_a_drafter_sends_no_path_twice_and_drafts_on_below_a_commit(drafter: str, text: Text) -> None:
    async with upstream_of(drafter) as peer:
        stream, copy, committed = peer.stream, Copy(), list(text.prompt)
        paths: dict[int, tuple[int, ...]] = {}  # by id: all tokens of the session up to the node
        stream.snapshot(committed)
        for _ in range(4):
            while True:
                frame = await stream.inbox.take("delta")
                for identity in copy.take(frame):
                    root = tuple(committed[: frame.root_position + 1])
                    path = (*paths.get(copy.parents[identity], root), copy.tokens[identity])
                    assert path not in paths.values()
                    paths[identity] = path
                if frame.exhausted and frame.root_position == len(committed) - 1:
                    break
            below = [identity for identity, path in paths.items() if path[:-1] == tuple(committed)]
            committed.append(copy.tokens[below[0]])
            stream.commit(committed, len(committed) - 1)
        assert min(below) < max(paths) // 2  # it was sent long before its parent was committed


async def test_a_drafter_sends_nothing_beyond_its_credit(drafter: str, text: Text) -> None:
    async with upstream_of(drafter) as peer:
        stream = peer.stream
        stream.snapshot(text.prompt, credit=0)
        await asyncio.sleep(0.2)
        assert not [frame for frame in stream.inbox.of("delta") if frame.tokens]
        for credit in (10, 22):
            stream.commit(text.prompt, len(text.prompt), credit=credit)
            await stream.inbox.until(lambda credit=credit: last_id(stream) > credit - SPECULATE.width)  # type: ignore[misc]
            await asyncio.sleep(0.2)
            assert last_id(stream) <= credit


def last_id(stream: Stream) -> int:
    return max((frame.first_id + len(frame.tokens) - 1 for frame in stream.inbox.of("delta")), default=0)


async def test_a_node_beyond_the_credit_is_a_fault_and_the_last_within_it_is_none(verifier: str, text: Text) -> None:
    async with (
        decoding(verifier, tokens=text.prompt, contract=text.contract, plan=WIDE, window=2) as router,
        drafting(verifier) as drafter,
    ):
        await router.generated(2)
        snapshot = await drafter.attach(router.session)
        root, credit = len(text.prompt) + 1, snapshot.credit
        assert credit == TREE_CAPACITY
        drafter.send_frame(**delta(text.whole, root, range(credit), parents=[0] * credit))
        await drafter.received_all(router.session)
        assert not drafter.inbox.of("commit")
        await router.acknowledge(2)
        await router.generated(4)
        assert (await drafter.committed()).credit == 2 * TREE_CAPACITY  # it made room for all
        drafter.send_frame(**delta(text.whole, root, [1], first_id=2 * credit))
        await drafter.received_all(router.session)
        assert not drafter.inbox.of("closed")
        drafter.send_frame(**delta(text.whole, root, [1], first_id=2 * credit + 1))
        closed = await drafter.inbox.take("closed", 1)
        assert closed.reason.startswith("malformed")
        assert "beyond the credit" in closed.reason


async def test_the_min_path_score_comes_with_every_commit(verifier: str, text: Text) -> None:
    async with (
        decoding(verifier, tokens=text.prompt, contract=text.contract, plan=WIDE, window=4) as router,
        drafting(verifier) as drafter,
    ):
        await router.generated(4)
        await drafter.attach(router.session)
        await router.acknowledge(4)
        await router.generated(8)
        await drafter.inbox.until(lambda: sum(len(commit.tokens) for commit in drafter.inbox.of("commit")) == 4)
        assert all(0 <= commit.min_path_score <= 1 for commit in drafter.inbox.of("commit"))


@pytest.mark.parametrize(("min_path_score", "ahead"), [(0.15, False), (0.4, True)])
async def test_a_drafter_neither_expands_nor_sends_below_the_min_path_score(
    drafter: str, text: Text, min_path_score: float, ahead: bool
) -> None:
    floor = min_path_score * min_path_score if ahead else min_path_score
    plan = plan_to_pb(Plan(version=1, depth=16, width=8, nodes=64))
    async with upstream_of(drafter) as peer:
        stream, copy = peer.stream, Copy()
        stream.snapshot(text.prompt, plan=plan, min_path_score=min_path_score, ahead=ahead)
        await stream.inbox.until(lambda: any(frame.exhausted for frame in stream.inbox.of("delta")))
        for frame in stream.inbox.of("delta"):
            copy.take(frame)
        dear = len(copy.tokens)
        assert dear > 1
        assert all(math.exp(-score / 16) >= floor * 0.999 for score in copy.scores.values())
        stream.inbox.frames.clear()
        # What was not worth sending is now, without a new token.
        stream.commit(text.prompt, len(text.prompt), min_path_score=0.02, ahead=ahead)
        await stream.inbox.until(lambda: any(frame.exhausted for frame in stream.inbox.of("delta")))
        for frame in stream.inbox.of("delta"):
            copy.take(frame)
        assert len(copy.tokens) > dear
        assert min(math.exp(-score / 16) for score in copy.scores.values()) < floor


async def test_a_min_path_score_of_1_has_a_drafter_rest_and_a_lower_one_draft(drafter: str, text: Text) -> None:
    async with upstream_of(drafter) as peer, open_channel(drafter) as channel:
        stub, stream = DrafterStub(channel), peer.stream
        before = (await stub.Describe(types_pb2.DescribeRequest())).levels
        stream.snapshot(text.prompt, min_path_score=1.0)
        frame = await stream.inbox.take("delta")
        assert (frame.exhausted, list(frame.tokens)) == (True, [])
        held = text.whole[: len(text.prompt) + 4]
        stream.commit(held, len(text.prompt), min_path_score=1.0)
        frame = await stream.inbox.take("delta")
        assert (frame.exhausted, list(frame.tokens)) == (True, [])
        assert (await stub.Describe(types_pb2.DescribeRequest())).levels == before  # not even the prompt was read
        stream.commit(held, len(held), min_path_score=0.02)
        await stream.inbox.until(lambda: any(frame.tokens for frame in stream.inbox.of("delta")))
        assert (await stub.Describe(types_pb2.DescribeRequest())).levels > before


async def test_an_abandoned_node_is_not_built_upon(drafter: str, text: Text) -> None:
    async with upstream_of(drafter) as peer:
        stream, copy = peer.stream, Copy()
        stream.snapshot(text.prompt)
        await stream.inbox.until(lambda: any(frame.exhausted for frame in stream.inbox.of("delta")))
        for frame in stream.inbox.of("delta"):
            copy.take(frame)
        first = [identity for identity, parent in copy.parents.items() if parent == 0]
        stream.inbox.frames.clear()
        stream.commit(text.prompt, len(text.prompt), dropped=first, plan=plan_to_pb(Plan(version=2, depth=9)))
        await stream.inbox.until(lambda: any(frame.exhausted for frame in stream.inbox.of("delta")))
        assert stream.inbox.of("delta")[0].first_id == len(copy.tokens) + 1
        for frame in stream.inbox.of("delta"):
            for identity in copy.take(frame):
                ancestors = set(lineage(copy, identity))
                assert not ancestors & set(first)


def lineage(copy: Copy, identity: int) -> Iterator[int]:
    while identity := copy.parents[identity]:
        yield identity


async def test_plan_changes_travel_in_commits_and_a_lower_version_is_ignored(verifier: str, text: Text) -> None:
    def version(number: int, **changes: int) -> types_pb2.Plan:
        return plan_to_pb(Plan(version=number, depth=4, overlap=PlanOverlap.ALWAYS, **changes))

    async with (
        decoding(verifier, tokens=text.prompt, contract=text.contract, plan=version(3), window=4) as router,
        drafting(verifier) as drafter,
    ):
        await router.generated(4)
        assert (await drafter.attach(router.session)).plan == version(3)
        router.send_frame(plan=version(5, width=2))
        update = await drafter.inbox.take("commit")
        assert (update.plan, list(update.tokens), update.position) == (version(5, width=2), [], len(text.prompt) + 4)
        router.send_frame(plan=version(4))
        router.send_frame(plan=version(5))
        await router.acknowledge(4)
        await router.generated(8)
        assert {report.plan_version for report in router.reports[4:]} == {5}
        await drafter.inbox.until(lambda: bool(drafter.inbox.of("commit")))
        assert not any(commit.HasField("plan") for commit in drafter.inbox.of("commit"))
        router.send_frame(plan=version(9))
        await drafter.inbox.until(lambda: any(commit.plan.version == 9 for commit in drafter.inbox.of("commit")))


async def test_a_drafter_obeys_the_plan_of_the_highest_version(drafter: str, text: Text) -> None:
    async with upstream_of(drafter) as peer:
        stream, copy = peer.stream, Copy()

        async def grown() -> Copy:
            await stream.inbox.until(lambda: any(frame.exhausted for frame in stream.inbox.of("delta")))
            while stream.inbox.of("delta"):
                copy.take(await stream.inbox.take("delta"))
            return copy

        stream.snapshot(text.prompt, plan=plan_to_pb(Plan(version=4, depth=2, width=2)))
        nodes = (await grown()).parents
        assert max(copy.depth(identity) for identity in nodes) == 2
        assert max(list(nodes.values()).count(parent) for parent in nodes.values()) == 2
        before = len(nodes)
        for version in (3, 4):
            stale = plan_to_pb(Plan(version=version, depth=9, width=9, nodes=100))
            stream.commit(text.prompt, len(text.prompt), plan=stale)
            assert len((await grown()).parents) == before
        stream.commit(text.prompt, len(text.prompt), plan=plan_to_pb(Plan(version=5, depth=4, width=3)))
        assert len((await grown()).parents) > before
        assert max(copy.depth(identity) for identity in nodes) == 4
        stream.commit(text.prompt, len(text.prompt), plan=plan_to_pb(Plan(version=6, depth=0)))
        stream.commit(text.whole[: len(text.prompt) + 2], len(text.prompt))
        await asyncio.sleep(0.2)
        assert not stream.inbox.of("delta")


async def until_idle(pid: int) -> None:
    """Waits until a process computes next to nothing."""

    def computed_s() -> float:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async with asyncio.timeout(20):
        before = -1.0
        while (now := computed_s()) - before > 0.05:
            before = now
            await asyncio.sleep(0.5)


async def test_commits_to_a_drafter_that_does_not_read_join_and_become_a_snapshot(
    verifier: str, cluster: LocalCluster, text: Text
) -> None:
    far_off, nearby = new_name(), new_name()
    opening = {"tokens": text.prompt, "contract": text.contract, "plan": WIDE}
    async with drafting(verifier, options=NARROW) as drafter:
        for session in (far_off, nearby):
            await drafter.subscribe(session)
        async with (
            decoding(verifier, session_id=far_off, window=76, **opening) as far,
            decoding(verifier, session_id=nearby, window=80, **opening) as near,
        ):
            for attachment in (1, 2):
                await drafter.inbox.take("snapshot", attachment)
            drafter.reads.clear()
            for number in range(FILLING):
                await drafter.subscribe(near.session, attachment=10 + number, signed=b"none")
                if number % 500 == 0:  # so that they are not refused in a row
                    drafter.send_frame(heartbeat=types_pb2.Heartbeat())
            await until_idle(cluster.processes["verifier-0"].pid)  # what it can send is sent
            await near.acknowledge(80)
            await near.generated(160)
            for window in range(1, 6):
                await far.acknowledge(76 * window)
            assert len(await far.generated(6 * 76)) > ALIAS_SPAN + 76  # a window was sent before
            near.send_frame(plan=plan_to_pb(Plan(version=7, depth=3)))
            await until_idle(cluster.processes["verifier-0"].pid)
            drafter.reads.set()
            await drafter.inbox.until(lambda: bool(drafter.inbox.of("snapshot", 1)))
            order = [(kind, message.attachment) for kind, message in drafter.inbox.frames if kind != "heartbeat"]
            behind = order[len(order) - order[::-1].index(("commit", 2)) :]
            assert {kind for kind, _ in behind[:-1]} == {"closed"}  # it was full before the commit was there
            assert behind[-1] == ("snapshot", 1)
            snapshot = await drafter.inbox.take("snapshot", 1)
            assert list(snapshot.tokens) == far.tokens
            assert (snapshot.last, snapshot.digest) == (True, extend(EMPTY, far.tokens))
            commits, lost = drafter.inbox.of("commit", 2), drafter.inbox.of("commit", 1)
            first = commits[0].position - len(text.prompt)
            assert [token for commit in commits for token in commit.tokens] == text.answer[first:160]
            assert (commits[-1].digest, commits[-1].plan.version) == (extend(EMPTY, near.tokens), 7)
            assert len(commits[-1].tokens) > 30
            assert sum(len(commit.tokens) for commit in lost) < 200


async def test_a_drafter_that_lets_thousands_of_frames_wait_loses_its_stream(
    verifier: str, cluster: LocalCluster, text: Text
) -> None:
    async with (
        decoding(verifier, tokens=text.prompt, contract=text.contract, window=4) as router,
        drafting(verifier) as other,
    ):
        await router.generated(4)
        await other.attach(router.session)
        streams = (await described(verifier)).drafters
        async with drafting(verifier, options=NARROW) as deaf:
            deaf.reads.clear()
            for number in range(CONTROL_FRAMES):
                await deaf.subscribe(router.session, signed=b"none")
                if number % 500 == 0:  # so that they are not refused in a row
                    deaf.send_frame(heartbeat=types_pb2.Heartbeat())
            await until_idle(cluster.processes["verifier-0"].pid)
            assert (await described(verifier)).drafters == streams + 1
            deaf.beats = False  # gRPC hides why a stream ended from who writes to it just then
            async with asyncio.timeout(20):
                while (await described(verifier)).drafters > streams:
                    await deaf.subscribe(router.session, signed=b"none")
                    await asyncio.sleep(0.25)
            deaf.reads.set()
            end = await deaf.inbox.end()
            assert (end.code, "does not read" in end.details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        assert other.inbox.open
        await router.acknowledge(4)
        assert await router.generated(8) == text.answer[:8]
