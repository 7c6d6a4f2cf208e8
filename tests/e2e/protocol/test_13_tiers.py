"""13. Tiers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from outrider.core.session.contract import Contract
from outrider.core.session.digest import EMPTY, extend
from outrider.rpc.channels import open_channel
from outrider.v1 import drafter_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.drafter_pb2_grpc import DrafterStub
from outrider.wire.tickets import Permit
from outrider.wire.types import contract_to_pb
from tests.e2e.mini_router import SIGNERS
from tests.e2e.protocol.conftest import Text
from tests.e2e.protocol.peers import RawDrafter, delta, drafting
from tests.e2e.protocol.upstreams import Attached, Copy, Stream, upstream_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

NAME = "below"
LENGTH = 40  # tokens that are committed at first


class Between(NamedTuple):
    """A real drafter, with both of its neighbours played by hand."""

    above: Stream
    below: RawDrafter
    mid: Attached
    ticket: bytes

    @property
    def session(self) -> str:
        return self.mid.subscribed.session_id

    async def subscribe(self) -> int:
        return await self.below.subscribe(self.session, signed=self.ticket)


@asynccontextmanager
async def between(drafter: str) -> AsyncIterator[Between]:
    """The lower drafter has greeted, and no more."""
    async with upstream_of(drafter) as mid, open_channel(drafter) as channel:
        there = await DrafterStub(channel).Describe(types_pb2.DescribeRequest())
        permit = Permit(mid.subscribed.session_id, "", NAME, there.worker_id, 1)
        async with drafting(drafter, NAME, greets=False) as below:
            hello = pb.Hello(drafter_id=NAME, tokenizer_digest=there.tokenizer_digest, vocabulary=there.vocabulary)
            below.send_frame(hello=hello)
            assert (await below.inbox.take("welcome")).upstream_id == there.worker_id
            yield Between(mid.stream, below, mid, SIGNERS[drafter].sign(permit))


async def test_nodes_go_up_at_once_with_their_origin_and_are_judged_afterwards(drafter: str, text: Text) -> None:
    async with between(drafter) as peers:
        peers.above.snapshot(text.whole[:LENGTH], min_path_score=1.0, answer_position=30)
        await peers.subscribe()
        snapshot = await peers.below.inbox.take("snapshot")
        assert list(snapshot.tokens) == text.whole[:LENGTH]
        terms = snapshot.min_path_score, snapshot.credit, snapshot.epoch, snapshot.answer_position
        assert terms == (1.0, 512, 1, 30)
        tokens = text.whole[LENGTH : LENGTH + 3]
        peers.below.send_frame(**delta(text.whole, LENGTH - 1, tokens))
        await peers.above.inbox.until(lambda: any(frame.tokens for frame in peers.above.inbox.of("delta")))
        sent = next(frame for frame in peers.above.inbox.of("delta") if frame.tokens)
        assert (list(sent.tokens), sent.origin, sent.first_id) == (tokens, NAME, 1)
        assert not sent.rescored
        # With a threshold at which its model works, one pass judges them all: they are what the text goes on with.
        peers.above.commit(text.whole[:LENGTH], LENGTH, credit=512)
        await peers.above.inbox.until(lambda: any(frame.rescored for frame in peers.above.inbox.of("delta")))
        judged = next(frame for frame in peers.above.inbox.of("delta") if frame.rescored)
        assert judged.rescore_version == 1
        assert set(judged.rescored) <= {1, 2, 3}
        assert len(judged.rescored_edges) == len(judged.rescored)
        assert min(judged.rescored_edges) > 0  # below had called them certain


async def test_hints_name_the_best_of_the_tree_and_may_be_drafted_under(drafter: str, text: Text) -> None:
    async with between(drafter) as peers:
        peers.above.snapshot(text.whole[:LENGTH])
        await peers.subscribe()
        await peers.below.inbox.take("snapshot")
        hints = await peers.below.inbox.take("hints")
        assert (hints.attachment, hints.epoch, hints.root_position) == (1, 1, LENGTH - 1)
        assert 0 < len(hints.tokens) == len(hints.parents) == len(hints.edges)
        await peers.above.inbox.until(lambda: any(frame.tokens for frame in peers.above.inbox.of("delta")))
        copy = Copy()
        for frame in peers.above.inbox.of("delta"):
            copy.take(frame)
        known = {(copy.tokens[identity], copy.depth(identity)) for identity in copy.tokens}
        assert (hints.tokens[0], 1) in known
        chain = [hints.tokens[0], 5]
        peers.below.send_frame(**delta(text.whole, LENGTH - 1, chain))
        await peers.above.inbox.until(
            lambda: any(frame.origin == NAME and 5 in frame.tokens for frame in peers.above.inbox.of("delta"))
        )
        sent = next(frame for frame in peers.above.inbox.of("delta") if frame.origin == NAME)
        assert list(sent.tokens) == [5]  # the node above was there
        copy.take(next(frame for frame in peers.above.inbox.of("delta") if frame.origin == NAME))


async def test_a_drafter_that_joins_when_the_tree_is_drawn_is_sent_its_best_too(drafter: str, text: Text) -> None:
    async with between(drafter) as peers:
        peers.above.snapshot(text.whole[:LENGTH])
        await peers.above.inbox.until(lambda: any(frame.exhausted for frame in peers.above.inbox.of("delta")))
        await peers.subscribe()
        assert (await peers.below.inbox.take("hints")).tokens


async def test_commits_are_forwarded_to_lower_tiers_with_all_terms(drafter: str, text: Text) -> None:
    async with between(drafter) as peers:
        peers.above.snapshot(text.whole[:LENGTH], min_path_score=1.0)
        await peers.subscribe()
        await peers.below.inbox.take("snapshot")
        peers.above.commit(text.whole[: LENGTH + 2], LENGTH, min_path_score=0.25, credit=100)
        commit = await peers.below.inbox.take("commit")
        assert (commit.position, list(commit.tokens)) == (LENGTH, text.whole[LENGTH : LENGTH + 2])
        assert commit.digest == extend(EMPTY, text.whole[: LENGTH + 2])
        assert commit.min_path_score == 0.25
        assert commit.credit <= 100


async def test_a_drop_by_the_upstream_is_reported_to_the_sender_of_the_node(drafter: str, text: Text) -> None:
    async with between(drafter) as peers:
        peers.above.snapshot(text.whole[:LENGTH], min_path_score=0.99)
        await peers.subscribe()
        await peers.below.inbox.take("snapshot")
        peers.below.send_frame(**delta(text.whole, LENGTH - 1, [5, 6]))
        await peers.above.inbox.until(lambda: any(frame.tokens for frame in peers.above.inbox.of("delta")))
        peers.above.commit(text.whole[:LENGTH], LENGTH, min_path_score=0.99, dropped=[2])
        await peers.below.inbox.until(lambda: any(frame.dropped for frame in peers.below.inbox.of("commit")))
        assert [list(frame.dropped) for frame in peers.below.inbox.of("commit") if frame.dropped] == [[2]]


async def test_the_end_of_a_drafters_own_subscription_ends_those_below(drafter: str, text: Text) -> None:
    async with between(drafter) as peers:
        peers.above.snapshot(text.whole[:LENGTH])
        await peers.subscribe()
        await peers.below.inbox.take("snapshot")
        peers.above.send_frame(closed=pb.Closed(attachment=1, reason="finished"))
        closed = await peers.below.inbox.take("closed")
        assert closed.attachment == 1


async def test_a_new_snapshot_from_above_gives_lower_tiers_a_snapshot(drafter: str, text: Text) -> None:
    async with between(drafter) as peers:
        peers.above.snapshot(text.whole[:LENGTH], min_path_score=1.0)
        await peers.subscribe()
        await peers.below.inbox.take("snapshot")
        peers.below.send_frame(**delta(text.whole, LENGTH - 1, [5, 6]))
        await peers.above.inbox.until(lambda: any(frame.tokens for frame in peers.above.inbox.of("delta")))
        peers.above.snapshot(text.whole[: LENGTH + 5], min_path_score=1.0)
        snapshot = await peers.below.inbox.take("snapshot")
        assert list(snapshot.tokens) == text.whole[: LENGTH + 5]
        peers.below.send_frame(**delta(text.whole, LENGTH + 4, [7], first_id=3))
        await peers.above.inbox.until(lambda: any(7 in frame.tokens for frame in peers.above.inbox.of("delta")))


async def test_a_ticket_for_another_upstream_is_refused(drafter: str, text: Text) -> None:
    async with between(drafter) as peers:
        peers.above.snapshot(text.whole[:LENGTH])
        permit = Permit(peers.session, "", NAME, "verifier-x", 1)
        await peers.below.subscribe(peers.session, signed=SIGNERS[drafter].sign(permit))
        assert "foreign ticket" in (await peers.below.inbox.take("closed")).reason


async def test_a_session_whose_rule_draws_from_q_has_no_lower_tier(drafter: str, text: Text) -> None:
    async with between(drafter) as peers:
        drawn = contract_to_pb(Contract(seed=1, max_tokens=500, rule="recursive-rejection"))
        peers.above.snapshot(text.whole[:LENGTH], contract=drawn)
        await peers.subscribe()
        assert "recursive-rejection" in (await peers.below.inbox.take("closed")).reason


async def test_a_judgement_of_a_node_that_was_never_sent_ends_the_attachment(drafter: str, text: Text) -> None:
    async with between(drafter) as peers:
        peers.above.snapshot(text.whole[:LENGTH], min_path_score=1.0)
        await peers.subscribe()
        await peers.below.inbox.take("snapshot")
        wrong = {"rescored": [9], "rescored_edges": bytes(1), "rescore_version": 1}
        peers.below.send_frame(**delta(text.whole, LENGTH - 1, [5], **wrong))
        assert "malformed: rescored" in (await peers.below.inbox.take("closed")).reason


@pytest.mark.parametrize(
    "wrong",
    [
        {"rescored": [1], "rescored_edges": b""},
        {"rescored": [1] * 1025, "rescored_edges": bytes(1025)},
        {"origin": "x" * 65},
    ],
)
async def test_judgements_and_origins_are_bounded(drafter: str, text: Text, wrong: dict[str, Any]) -> None:
    async with between(drafter) as peers:
        peers.above.snapshot(text.whole[:LENGTH], min_path_score=1.0)
        await peers.subscribe()
        await peers.below.inbox.take("snapshot")
        peers.below.send_frame(**delta(text.whole, LENGTH - 1, [5], **wrong))
        assert (await peers.below.inbox.take("closed")).reason.startswith("malformed")


async def test_a_repeated_attach_with_another_upstream_moves_a_drafter(drafter: str, text: Text) -> None:
    async with upstream_of(drafter) as first, upstream_of(drafter) as second:
        request = pb.AttachRequest(
            session_id=first.subscribed.session_id, epoch=1, upstream=second.upstream.address, ticket=b"a ticket"
        )
        for _ in range(2):
            await first.drafter.Attach(request)
        assert (await first.stream.inbox.take("unsubscribe")).attachment == 1
        moved = await second.stream.inbox.take("subscribe")
        assert moved.session_id == first.subscribed.session_id
        assert not second.stream.inbox.of("subscribe")


async def test_malformed_hints_are_refused_and_counted(drafter: str, text: Text) -> None:
    async with upstream_of(drafter) as peer:
        peer.stream.snapshot(text.whole[:LENGTH])
        await peer.stream.inbox.take("delta")
        before = (await peer.drafter.Describe(types_pb2.DescribeRequest())).refused_frames
        hints = {"attachment": 1, "epoch": 1, "root_position": LENGTH - 1}
        peer.stream.send_frame(
            hints=pb.Hints(**hints, parents=[1], tokens=[5], edges=bytes(1))
        )  # its parent is before the first
        await peer.stream.inbox.take("subscribe")
        peer.stream.snapshot(text.whole[:LENGTH], attachment=2)
        await peer.stream.inbox.take("delta", 2)
        assert (await peer.drafter.Describe(types_pb2.DescribeRequest())).refused_frames == before + 1


async def test_a_drafter_drafts_on_below_hints(drafter: str, text: Text) -> None:
    async with upstream_of(drafter) as peer:
        peer.stream.snapshot(text.whole[:LENGTH])
        await peer.stream.inbox.until(lambda: any(frame.exhausted for frame in peer.stream.inbox.of("delta", 1)))
        unlikely = 4000
        hints = {"attachment": 1, "epoch": 1, "root_position": LENGTH - 1}
        peer.stream.send_frame(hints=pb.Hints(**hints, parents=[0], tokens=[unlikely], edges=bytes(1)))
        copy = Copy()

        def drafted_below() -> bool:
            copy.__init__()  # type: ignore[misc]
            for frame in peer.stream.inbox.of("delta", 1):
                copy.take(frame)
            return any(copy.tokens.get(parent) == unlikely for parent in copy.parents.values())

        await peer.stream.inbox.until(drafted_below)


async def test_the_session_s_new_owner_is_announced_below(drafter: str, text: Text) -> None:
    async with between(drafter) as peers:
        peers.above.snapshot(text.whole[:LENGTH], min_path_score=1.0)
        await peers.subscribe()
        await peers.below.inbox.take("snapshot")
        address = peers.mid.upstream.address
        higher = pb.AttachRequest(session_id=peers.session, epoch=2, upstream=address, ticket=b"a ticket")
        await peers.mid.drafter.Attach(higher)
        assert (await peers.above.inbox.take("subscribe")).epoch == 2
        assert (await peers.below.inbox.take("closed")).attachment == 1
