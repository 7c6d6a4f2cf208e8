"""5. Nodes."""

import asyncio
import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.core.control.arms.arm import OverlapMode
from outrider.core.control.cost.budget import CostModel
from outrider.core.control.cost.calibration import Calibration
from outrider.core.control.holds.arrival_model import HOLDS, ArrivalPatterns
from outrider.core.sampling.sampler import Choice
from outrider.core.session.contract import Contract, Plan, PlanOverlap, StepReport
from outrider.core.tree.score_codec import edge_code, edge_from_code
from outrider.engine.kv.kv_slots import AcquiredSlot
from outrider.upstream.servicer import UpstreamServicer
from outrider.upstream.ticket_verifier import TicketVerifier
from outrider.upstream.upstream_session import UpstreamStream
from outrider.v1.drafter_pb2 import DraftUp
from outrider.v1.types_pb2 import Heartbeat
from outrider.wire.types import plan_to_pb
from tests.e2e.protocol.conftest import Text
from tests.e2e.protocol.peers import decoding, delta, drafting
from tests.e2e.protocol.upstreams import Copy, upstream_of
from verifier_svc.scheduler import StepScheduler
from verifier_svc.session import SessionStart, VerifierSession

pytestmark = pytest.mark.asyncio(loop_scope="session")

# The values of docs/protocol.md.
ALIAS_SPAN = 256
TREE_CAPACITY = 512

WIDE = plan_to_pb(Plan(version=1, depth=8, width=4, nodes=16, wait_us=0, overlap=PlanOverlap.ALWAYS))


async def test_ids_count_up_from_1_and_parents_precede_their_children(drafter: str, text: Text) -> None:
    async with upstream_of(drafter) as peer:
        stream, copy = peer.stream, Copy()
        stream.snapshot(text.prompt)
        expected = 1
        for length in range(len(text.prompt), len(text.prompt) + 5):
            if length > len(text.prompt):
                stream.commit(text.whole[:length], length - 1)
            while True:
                frame = await stream.inbox.take("delta")
                assert (frame.attachment, frame.epoch, frame.plan_version) == (1, 1, 1)
                assert len(frame.parents) == len(frame.tokens) == len(frame.edges)
                assert frame.first_id == expected
                expected += len(copy.take(frame))  # this fails for a parent that was not sent
                if frame.exhausted and frame.root_position == length - 1:
                    break
        assert expected > 30
        assert max(copy.depth(identity) for identity in copy.tokens) > 3


async def test_an_exhausted_drafter_sends_no_node_before_the_next_commit(drafter: str, text: Text) -> None:
    async with upstream_of(drafter) as peer:
        stream = peer.stream
        stream.snapshot(text.prompt)
        await stream.inbox.until(lambda: any(frame.exhausted for frame in stream.inbox.of("delta")))
        assert [frame.exhausted for frame in stream.inbox.of("delta")].index(True) == len(stream.inbox.of("delta")) - 1
        await asyncio.sleep(0.2)
        assert stream.inbox.of("delta")[-1].exhausted
        stream.inbox.frames.clear()
        stream.commit(text.prompt, len(text.prompt), min_path_score=1.0)  # nothing is worth it: the delta is empty
        frame = await stream.inbox.take("delta")
        assert (frame.exhausted, list(frame.tokens)) == (True, [])


async def no_keys() -> dict[bytes, float]:
    return {}


async def test_a_verifier_does_not_wait_for_an_exhausted_drafter_until_the_next_commit() -> None:
    engine: Any = SimpleNamespace(slots=1, treeless="", rewinds=True, memory=lambda *_: None)
    loop = StepScheduler(engine, CostModel([(2, 0.01)]), prefill_chunk=128, max_nodes=64, publish=lambda *_: None)
    sink = UpstreamServicer("verifier", b"", TicketVerifier(no_keys, time.time))
    sink.serve(loop)
    plan = Plan(version=1, depth=8, wait_us=1_000_000)
    start = SessionStart("s", "", 1, (1, 2, 3), 3, Contract(seed=1, max_tokens=100), plan, 64)
    session = VerifierSession(start, AcquiredSlot(0, 2, None), 4096, ArrivalPatterns())
    streams = [UpstreamStream(name, Heartbeat) for name in ("one", "another")]
    for stream in streams:
        session.subscribe(stream, 1, Calibration())
    session.arrivals.arrived(-100.0, 1.0, passing=True)  # they do not begin any more

    def patience() -> float:
        """How long a step would be held back that begins right after a commit, where a wait has long not been tried."""
        for ago in range(HOLDS.retry_steps[1], -1, -1):
            session.arrivals.restart(-float(ago), 1.0)
        _, budget = loop.choice.select(loop.choice.base_works([session]), 0.0)
        return loop.learning.hold_policy.hold_seconds([session], budget, now=0.0, tokens_per_s=0.0)

    assert patience() > 0.001
    for stream, waits in zip(streams, (True, False), strict=True):
        sink.receive(stream, DraftUp(**delta([1, 2, 3], 2, [], exhausted=True)))
        assert (patience() > 0) == waits  # as long as one may still bring something

    def commit(token: int) -> None:
        session.commit([Choice(token, 1.0, b"")], StepReport(), now=1e-9)
        sink.sender.publish(session, len(session.tokens) - 1, [token])
        session.cached = len(session.tokens) - 1

    commit(7)
    assert patience() > 0.001
    session.terms.set_overlap_mode(OverlapMode.REST)
    commit(8)  # its terms have drafters rest
    session.terms.set_overlap_mode(OverlapMode.TURNS)
    assert patience() == 0.0  # the next commit has these terms
    commit(9)
    assert patience() > 0.001


async def test_late_nodes_below_a_root_that_was_left_behind_become_aliases_and_their_children_are_good(
    verifier: str, text: Text
) -> None:
    async with (
        decoding(verifier, tokens=text.prompt, contract=text.contract, plan=WIDE, window=16) as router,
        drafting(verifier) as drafter,
    ):
        await router.generated(16)
        await drafter.attach(router.session)
        # From the end of the prompt, although sixteen tokens were committed since; then on below these ids.
        drafter.send_frame(**delta(text.whole, len(text.prompt) - 1, text.answer[:12]))
        drafter.send_frame(**delta(text.whole, 5, text.answer[12:20], first_id=13, parents=[1] * 8))
        await drafter.received_all(router.session)
        assert (await router.step()).accepted
        assert not any(commit.dropped for commit in drafter.inbox.of("commit"))


async def test_aliases_live_256_positions(verifier: str, text: Text) -> None:
    length = ALIAS_SPAN + 20
    async with (
        decoding(verifier, tokens=text.prompt, contract=text.contract, plan=WIDE, window=length) as router,
        drafting(verifier) as drafter,
    ):
        await router.generated(length)
        await drafter.attach(router.session)
        root = len(text.prompt) + length - 1
        too_far = root - ALIAS_SPAN - 2
        drafter.send_frame(**delta(text.whole, too_far, text.whole[too_far + 1 : root + 5], root_digest=7))
        await drafter.received_all(router.session)
        await router.acknowledge(5)
        await router.generated(length + 5)
        assert all(report.verified == 0 for report in router.reports)
        root += 5
        first = ALIAS_SPAN + 7  # the next id
        drafter.send_frame(**delta(text.whole, root - 256, text.whole[root - 255 : root + 5], first_id=first))
        await drafter.received_all(router.session)
        await router.acknowledge(10)
        await router.generated(length + 10)
        assert any(report.accepted for report in router.reports)
        assert {kind for kind, _ in drafter.inbox.frames} <= {"commit", "heartbeat"}
        assert not any(commit.dropped for commit in drafter.inbox.of("commit"))


async def test_a_node_that_was_decided_otherwise_is_dead_with_all_below_and_no_message_is_sent(
    verifier: str, text: Text
) -> None:
    async with (
        decoding(verifier, tokens=text.prompt, contract=text.contract, plan=WIDE, window=8) as router,
        drafting(verifier) as drafter,
    ):
        await router.generated(8)
        await drafter.attach(router.session)
        root = len(text.prompt) + 3
        wrong = [(text.answer[4] + 1) % 4096, *text.answer[5:12]]  # after it the rest would be right
        drafter.send_frame(**delta(text.whole, root, wrong))
        drafter.send_frame(**delta(text.whole, root, text.answer[8:12], first_id=9, parents=[5, 1, 1, 1]))
        await drafter.received_all(router.session)
        await router.acknowledge(8)
        await router.generated(16)
        assert all(report.verified == 0 for report in router.reports)
        drafter.send_frame(**delta(text.whole, root, text.answer[16:18], first_id=13, parents=[4, 1]))  # a commit later
        await drafter.received_all(router.session)
        await router.acknowledge(16)
        await router.generated(24)
        assert all(report.verified == 0 for report in router.reports)
        assert {kind for kind, _ in drafter.inbox.frames} <= {"commit", "heartbeat"}
        assert not any(commit.dropped for commit in drafter.inbox.of("commit"))


async def test_a_node_whose_parent_is_not_known_is_dropped_and_may_be_sent_again_under_a_new_id(
    verifier: str, text: Text
) -> None:
    async with (
        decoding(verifier, tokens=text.prompt, contract=text.contract, plan=WIDE, window=8) as router,
        drafting(verifier) as drafter,
    ):
        await router.generated(8)
        await drafter.attach(router.session)
        root = len(text.prompt) + 7
        drafter.send_frame(**delta(text.whole, root, text.answer[8:11], first_id=10, parents=[3, 1, 0]))
        update = await drafter.inbox.take("commit")
        assert (list(update.tokens), update.position, list(update.dropped)) == ([], root + 1, [10, 11])
        assert update.digest == delta(text.whole, root, [])["delta"].root_digest
        drafter.send_frame(**delta(text.whole, root, text.answer[8:10], first_id=13))
        await drafter.received_all(router.session)
        assert (await router.step()).accepted


async def test_a_full_tree_drops_its_worst_leaf_for_a_better_node_and_informs_the_sender(
    verifier: str, text: Text
) -> None:
    async with (
        decoding(verifier, tokens=text.prompt, contract=text.contract, plan=WIDE, window=2) as router,
        drafting(verifier) as first,
        drafting(verifier) as second,
    ):
        await router.full()
        for drafter in (first, second):
            assert (await drafter.attach(router.session)).credit == TREE_CAPACITY
        root, right = len(text.prompt) + 1, text.answer[2]
        others = [token for token in range(TREE_CAPACITY + 6) if token != right]
        edges = bytearray(b"\xc0" * TREE_CAPACITY)
        edges[9], edges[19] = 250, 240
        nodes = [*others[: TREE_CAPACITY - 1], right]
        first.send_frame(**delta(text.whole, root, nodes, parents=[0] * TREE_CAPACITY, edges=bytes(edges)))
        await first.received_all(router.session)
        # The right one is there: it gets an alias and a better score. Two find no place; two take the worst places.
        again = [right, *others[TREE_CAPACITY : TREE_CAPACITY + 4]]
        second.send_frame(**delta(text.whole, root, again, parents=[0] * 5, edges=b"\x00\xff\xff\x10\x10"))
        assert list((await second.inbox.take("commit")).dropped) == [2, 3]
        assert list((await first.inbox.take("commit")).dropped) == [10, 20]
        assert (await router.step()).accepted == 1
        assert not first.inbox.of("closed", 1)


async def test_a_node_that_two_drafters_send_is_one_node_with_an_alias_for_each_and_the_larger_score(
    verifier: str, text: Text
) -> None:
    async with (
        decoding(verifier, tokens=text.prompt, contract=text.contract, plan=WIDE, window=8) as router,
        drafting(verifier) as modest,
        drafting(verifier) as sure,
    ):
        await router.generated(8)
        for drafter in (modest, sure):
            await drafter.attach(router.session)
        root = len(text.prompt) - 1
        modest.send_frame(**delta(text.whole, root + 8, text.answer[8:11], first_id=7, edges=b"\xff" * 3))
        await modest.received_all(router.session)
        sure.send_frame(**delta(text.whole, root + 8, text.answer[8:11]))
        await sure.received_all(router.session)
        report = await router.step()
        assert report.drafters == 2
        assert report.accepted == report.verified > 0  # none of them twice
        # The node is a committed token now. What either sends below it, by its own name for it, is good.
        modest.send_frame(**delta(text.whole, 3, text.answer[11:20], first_id=20, parents=[11] + [1] * 8))
        await modest.received_all(router.session)
        assert (await router.step()).accepted
        sure.send_frame(**delta(text.whole, 3, text.answer[11:28], first_id=20, parents=[17] + [1] * 16))
        await sure.received_all(router.session)
        assert (await router.step()).accepted
        for drafter in (modest, sure):
            assert not any(commit.dropped for commit in drafter.inbox.of("commit"))


async def test_the_larger_of_two_scores_for_a_node_counts(verifier: str, text: Text) -> None:
    one = plan_to_pb(Plan(version=1, depth=8, width=4, nodes=1, wait_us=0))
    async with (
        decoding(verifier, tokens=text.prompt, contract=text.contract, plan=one, window=8) as router,
        drafting(verifier) as modest,
        drafting(verifier) as sure,
    ):
        await router.full()
        for drafter in (modest, sure):
            await drafter.attach(router.session)
        for length in (8, 16):  # once the surer one comes second, once first
            rivals = [(text.answer[length] + 1) % 4096, text.answer[length]]
            both = [(modest, b"\x10\xff"), (sure, b"\x10\x00")]
            for drafter, edges in both if length == 8 else both[::-1]:
                root = len(text.prompt) + length - 1
                drafter.send_frame(**delta(text.whole, root, rivals, parents=[0, 0], edges=edges, first_id=length))
                await drafter.received_all(router.session)
            report = await router.step()
            assert (report.verified, report.accepted) == (1, 1)


async def test_a_replayed_delta_changes_nothing(verifier: str, text: Text) -> None:
    async with (
        decoding(verifier, tokens=text.prompt, contract=text.contract, plan=WIDE, window=8) as router,
        drafting(verifier) as drafter,
    ):
        await router.generated(8)
        await drafter.attach(router.session)
        root = len(text.prompt) + 7
        first = delta(text.whole, root, text.answer[8:10])
        known = delta(text.whole, root, [7, 8, 9, text.answer[11]], parents=[0, 1, 1, 1])  # ids 1 to 3 are taken
        known["delta"].first_id = 1
        for frame in (first, first, first):
            drafter.send_frame(**frame)
        drafter.send_frame(**delta(text.whole, root, text.answer[10:11], first_id=3, parents=[1]))
        drafter.send_frame(**known)
        drafter.send_frame(**first)
        await drafter.received_all(router.session)
        report = await router.step()
        assert report.accepted == report.verified > 0
        drafter.send_frame(**first)
        await drafter.received_all(router.session)
        assert {kind for kind, _ in drafter.inbox.frames} == {"commit"}


async def test_an_edge_is_one_byte_minus_sixteen_times_the_logarithm_of_a_chance() -> None:
    assert [edge_code(math.log(chance)) for chance in (1.0, 0.5, 0.1, 1e-30)] == [0, 11, 37, 255]
    for code in range(256):
        assert edge_code(edge_from_code(code)) == code
        assert edge_from_code(code) == -code / 16


async def test_a_path_s_score_is_the_product_of_its_edges(verifier: str, text: Text) -> None:
    three = plan_to_pb(Plan(version=1, depth=8, width=4, nodes=3, wait_us=0))
    async with (
        decoding(verifier, tokens=text.prompt, contract=text.contract, plan=three, window=8) as router,
        drafting(verifier) as drafter,
    ):
        await router.generated(8)
        await drafter.attach(router.session)
        # The right path: 0.88, 0.78, 0.69. A wrong token beside it, 0.73, comes third, although its edge is the worst.
        tokens = [*text.answer[8:11], (text.answer[8] + 1) % 4096]
        drafter.send_frame(
            **delta(text.whole, len(text.prompt) + 7, tokens, parents=[0, 1, 1, 0], edges=bytes([2, 2, 2, 5]))
        )
        await drafter.received_all(router.session)
        report = await router.step()
        assert 0 < report.verified <= 3
        assert report.accepted == min(report.verified, 2)
