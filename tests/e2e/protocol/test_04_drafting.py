"""4. Drafting: attach, subscribe, snapshot."""

import asyncio
import time
from dataclasses import replace

import pytest

from outrider.core.session.contract import Contract
from outrider.core.session.digest import EMPTY, extend
from outrider.upstream.drafter_sender import snapshot_parts
from outrider.v1 import drafter_pb2 as pb
from outrider.v1 import types_pb2
from outrider.wire.types import contract_to_pb, plan_to_pb
from tests.e2e.mini_router import SPECULATE, described
from tests.e2e.protocol.conftest import Text
from tests.e2e.protocol.peers import calling, decoding, delta, drafting, hello_to, start_of, subscribed
from tests.e2e.protocol.stream_probe import WITHIN_S, new_name
from tests.e2e.protocol.upstreams import refused_by, upstream_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

# The values of docs/protocol.md.
PATIENCE_S = 5.0
SNAPSHOT_TOKENS = 4096
WAITING_SUBSCRIPTIONS = 1024


async def test_the_drafting_stream_follows_the_sequence_from_hello_to_closed(verifier: str, text: Text) -> None:
    root = len(text.prompt) + 3
    contract = pb.Snapshot(contract=text.contract).contract
    contract.max_tokens = 12
    async with (
        decoding(verifier, tokens=text.prompt, contract=contract, window=4) as router,
        drafting(verifier, greets=False) as drafter,
    ):
        await router.generated(4)
        there = await described(verifier)
        hello = pb.Hello(drafter_id="x", tokenizer_digest=there.tokenizer_digest, vocabulary=there.vocabulary)
        drafter.send_frame(hello=hello)
        assert (await drafter.inbox.take("welcome")).upstream_id == there.worker_id
        drafter.name = "x"
        snapshot = await drafter.attach(router.session)
        assert (snapshot.attachment, snapshot.epoch, snapshot.position, snapshot.last) == (1, 1, 0, True)
        assert (list(snapshot.tokens), snapshot.digest) == (text.whole[: root + 1], extend(EMPTY, router.tokens))
        assert snapshot.contract == contract
        assert snapshot.plan == plan_to_pb(
            replace(SPECULATE, depth=7)
        )  # what is left of the answer, less the last token
        assert snapshot.credit == 512
        assert 0 <= snapshot.min_path_score <= 1
        drafter.send_frame(**delta(text.whole, root, text.answer[4:6]))
        await drafter.received_all(router.session)
        await router.acknowledge(4)
        commit = await drafter.committed()
        assert (commit.attachment, commit.epoch, commit.position) == (1, 1, root + 1)
        assert 2 <= len(commit.tokens) <= 3  # one node at least, and the token after it
        assert list(commit.tokens) == text.answer[4:][: len(commit.tokens)]
        drafter.send_frame(
            **delta(text.whole, root + len(commit.tokens), text.answer[4 + len(commit.tokens) : 9], first_id=3)
        )
        await drafter.received_all(router.session)
        await router.acknowledge(8)
        await router.inbox.take("finished")
        router.finish()
        closed = await drafter.inbox.take("closed", 1)
        assert closed.reason == "finished"
        assert router.tokens == text.whole[: len(text.prompt) + 12]
        assert not drafter.inbox.of("snapshot")


async def test_a_drafter_keeps_one_stream_to_an_upstream_for_all_its_sessions(drafter: str, text: Text) -> None:
    async with upstream_of(drafter) as peer:
        stream = peer.stream
        hello = stream.inbox.of("hello")
        assert [kind for kind, _ in stream.inbox.frames if kind != "heartbeat"] == ["hello"]
        there = await peer.drafter.Describe(types_pb2.DescribeRequest())
        assert hello == [
            pb.Hello(
                drafter_id=there.worker_id,
                tokenizer_digest=there.tokenizer_digest,
                vocabulary=there.vocabulary,
                public_sources=True,
                batches=True,
            )
        ]
        assert (peer.subscribed.attachment, peer.subscribed.ticket) == (1, b"a ticket")
        second = pb.AttachRequest(session_id=new_name(), epoch=3, upstream=peer.upstream.address, ticket=b"another")
        for _ in range(3):  # repeating it changes nothing
            await peer.drafter.Attach(second)
        subscribed = await stream.inbox.take("subscribe")
        assert (subscribed.attachment, subscribed.epoch, subscribed.ticket) == (2, 3, b"another")
        # Commits and deltas of one do not wait for a snapshot of the other that is still coming.
        stream.snapshot(text.whole[:10], last=False)
        stream.snapshot(text.whole[:40], attachment=2, epoch=3)
        assert (await stream.inbox.take("delta", 2)).epoch == 3
        stream.commit(text.whole[:44], 40, attachment=2, epoch=3)
        await stream.inbox.until(lambda: any(frame.root_position == 43 for frame in stream.inbox.of("delta", 2)))
        assert not stream.inbox.of("delta", 1)
        await peer.drafter.Detach(pb.DetachRequest(session_id=second.session_id, epoch=3))
        assert (await stream.inbox.take("unsubscribe")).attachment == 2
        before = await refused_by(peer.drafter)
        stream.commit(text.whole[:45], 44, attachment=2, epoch=3)  # of an attachment that has ended
        stream.snapshot(text.whole[10:20], position=10, digest=extend(EMPTY, text.whole[:20]))
        assert (await stream.inbox.take("delta", 1)).root_position == 19
        assert await refused_by(peer.drafter) == before + 1
        assert not stream.inbox.of("subscribe")
        stream.send_frame(closed=pb.Closed(attachment=1, reason="finished"))
        stream.commit(text.whole[:21], 20)
        async with asyncio.timeout(WITHIN_S):
            while await refused_by(peer.drafter) < before + 2:
                await asyncio.sleep(0.01)
        assert await refused_by(peer.drafter) == before + 2
        third = pb.AttachRequest(session_id=peer.subscribed.session_id, epoch=1, upstream=peer.upstream.address)
        await peer.drafter.Attach(third)
        assert (await stream.inbox.take("subscribe")).attachment == 3
        assert len(peer.upstream.streams) == 1


async def test_a_repeated_or_lower_attachment_number_is_a_replay_ignored_and_counted(verifier: str, text: Text) -> None:
    async with (
        decoding(verifier, tokens=text.prompt, contract=text.contract, window=4) as router,
        drafting(verifier) as drafter,
    ):
        await router.generated(4)
        await drafter.subscribe(router.session, attachment=5)
        await drafter.inbox.take("snapshot", 5)
        before = (await described(verifier)).refused_frames
        for number in (5, 4, 1, 0):
            await drafter.subscribe(router.session, attachment=number)
        drafter.send_frame(**delta(text.whole, len(text.prompt) + 3, text.answer[4:6], attachment=5))
        await drafter.received_all(router.session)
        assert (await described(verifier)).refused_frames == before + 5
        report = await router.step()
        assert (report.accepted > 0, report.drafters) == (True, 1)
        assert {kind for kind, _ in drafter.inbox.frames} <= {"commit", "heartbeat"}


async def test_subscriptions_wait_for_their_session_a_while_and_up_to_a_number(verifier: str, text: Text) -> None:
    early, given_up = new_name(), new_name()
    before = (await described(verifier)).refused_frames
    async with drafting(verifier) as patient, drafting(verifier, "another") as greedy:
        begun = time.monotonic()
        unknown = await patient.subscribe(new_name())
        for _ in range(WAITING_SUBSCRIPTIONS + 3):
            await greedy.subscribe("nobody's", signed=b"")
        for number in range(1, 4):  # those beyond are refused at once, and only those of this drafter
            closed = await greedy.inbox.take("closed")
            assert closed.attachment == WAITING_SUBSCRIPTIONS + number
            assert "too many" in closed.reason
        waiting = await patient.subscribe(early)
        over = await patient.subscribe(given_up)
        patient.send_frame(unsubscribe=pb.Unsubscribe(attachment=over))
        assert (await described(verifier)).refused_frames == before + 3
        start = await start_of(verifier, session_id=early, tokens=text.prompt, contract=text.contract, window=1)
        async with calling(verifier, start):
            assert list((await patient.inbox.take("snapshot", waiting)).tokens)[: len(text.prompt)] == text.prompt
        closed = await patient.inbox.take("closed", unknown, within_s=PATIENCE_S + 2)
        assert closed.reason == "unknown session"
        assert PATIENCE_S - 0.5 < time.monotonic() - begun < PATIENCE_S + 1
        await greedy.inbox.until(lambda: len(greedy.inbox.of("closed")) == WAITING_SUBSCRIPTIONS)
        assert {message.reason for message in greedy.inbox.of("closed")} == {"unknown session"}
        assert not patient.inbox.of("closed", over)
        assert (await described(verifier)).refused_frames == before + 3 + 1 + WAITING_SUBSCRIPTIONS


async def test_a_snapshot_is_sent_in_ordered_parts_and_only_the_last_has_the_terms() -> None:
    tokens = [position % 4096 for position in range(2 * SNAPSHOT_TOKENS + 5)]
    subscription = subscribed(tokens)
    parts = []
    for part in snapshot_parts(subscription):
        parts.append(part)
        subscription.session.tokens = tokens[:1]  # what is committed while it is being sent comes as commits
    assert [len(part.tokens) for part in parts] == [SNAPSHOT_TOKENS, SNAPSHOT_TOKENS, 5]
    assert [token for part in parts for token in part.tokens] == tokens
    assert [part.position for part in parts] == [0, SNAPSHOT_TOKENS, 2 * SNAPSHOT_TOKENS]
    assert [part.last for part in parts] == [False, False, True]
    assert {(part.attachment, part.epoch) for part in parts} == {(3, 7)}
    assert not any(part.HasField("contract") or part.HasField("plan") or part.digest for part in parts[:2])
    last = parts[2]
    assert (last.digest, last.credit, last.contract.seed) == (extend(EMPTY, tokens), 512, 5)
    assert (last.min_path_score, last.time_cost_tokens_per_s, last.ahead) == (0.25, 7.0, True)
    assert [(part.vocabulary, part.unpadded_vocabulary) for part in parts] == [(4096, 0), (4096, 0), (4096, 4000)]
    assert subscription.session.wire_bytes == sum(part.ByteSize() for part in parts)


async def test_position_0_restarts_a_snapshot_and_a_part_out_of_order_renews_the_subscription(
    drafter: str, text: Text
) -> None:
    async with upstream_of(drafter) as peer:
        stream, whole = peer.stream, text.whole
        before = await refused_by(peer.drafter)
        stream.snapshot(whole[40:60], last=False)
        stream.snapshot(whole[:10], last=False)  # begins anew
        stream.snapshot(whole[10:25], position=10, last=False)
        stream.snapshot(whole[25:30], position=25, digest=extend(EMPTY, whole[:30]))
        first = await stream.inbox.take("delta")
        assert (first.root_position, first.root_digest) == (29, extend(EMPTY, whole[:30]))
        assert await refused_by(peer.drafter) == before
        # Once it has a copy and drafts, parts that do not fit end that, too.
        stream.snapshot(whole[:10], last=False)
        stream.snapshot(whole[20:30], position=20, digest=extend(EMPTY, whole[:30]))
        assert (await stream.inbox.take("subscribe")).attachment == 2
        stream.commit(whole[:31], 30, attachment=2)  # it has no copy that this could be for
        stream.snapshot(whole[10:20], position=10, attachment=2, digest=extend(EMPTY, whole[:20]))
        assert (await stream.inbox.take("subscribe")).attachment == 3
        await asyncio.sleep(0.1)
        assert not stream.inbox.of("delta", 2)
        assert not stream.inbox.of("delta", 3)
        stream.snapshot([], attachment=3)  # a session has at least one token
        assert (await stream.inbox.take("subscribe")).attachment == 4
        stream.snapshot(whole[:20], attachment=4)
        again = await stream.inbox.take("delta", 4)
        assert (again.root_position, again.first_id) == (19, 1)


async def test_a_drafter_with_another_number_of_ids_is_accepted_and_is_sent_the_target_s(
    verifier: str, text: Text
) -> None:
    for vocabulary in (17, 2**32 - 1):
        async with (
            decoding(verifier, tokens=text.prompt, contract=text.contract, window=4) as router,
            drafting(verifier, greets=False) as drafter,
        ):
            drafter.send_frame(hello=await hello_to(verifier, drafter.name, vocabulary=vocabulary))
            await drafter.inbox.take("welcome")
            snapshot, there = await drafter.attach(router.session), await described(verifier)
            assert snapshot.vocabulary == snapshot.unpadded_vocabulary == there.vocabulary


async def test_a_drafter_sends_ids_that_the_target_can_pick_and_reads_all_its_ids(drafter: str, text: Text) -> None:
    largest = 2**31 - 2
    whole = [*text.whole[:20], largest, 5000, *text.whole[20:30]]
    async with upstream_of(drafter) as peer:
        stream = peer.stream
        for number, unpadded_vocabulary in enumerate((0, 300), 1):
            contract = Contract(seed=1, max_tokens=500, banned_ids=(5000, 6000), stop_ids=(largest,))
            sizes = {"vocabulary": largest + 1, "unpadded_vocabulary": unpadded_vocabulary}
            stream.snapshot(whole, attachment=number, contract=contract_to_pb(contract), **sizes)
            tokens: list[int] = []
            while len(tokens) < 20:
                delta = await stream.inbox.take("delta", number)
                assert (delta.root_position, delta.root_digest) == (len(whole) - 1, extend(EMPTY, whole))
                tokens += delta.tokens
            assert max(tokens) < (unpadded_vocabulary or 4096)
            whole += [largest, 7]
            stream.commit(whole, len(whole) - 2, attachment=number)
            while delta.root_position < len(whole) - 1:
                delta = await stream.inbox.take("delta", number)
            assert delta.root_digest == extend(EMPTY, whole)
            stream.commit([*whole, largest + 1], len(whole), attachment=number)  # malformed: it subscribes anew
            assert (await stream.inbox.take("subscribe")).attachment == number + 1


async def test_unsubscribe_ends_an_attachment_and_later_frames_of_it_are_ignored_and_counted(
    verifier: str, text: Text
) -> None:
    async with (
        decoding(verifier, tokens=text.prompt, contract=text.contract, window=4) as router,
        drafting(verifier) as drafter,
    ):
        await router.generated(4)
        await drafter.attach(router.session)
        before = (await described(verifier)).refused_frames
        drafter.send_frame(unsubscribe=pb.Unsubscribe(attachment=1))
        await drafter.received_all(router.session)
        assert (await described(verifier)).refused_frames == before + 1
        drafter.send_frame(unsubscribe=pb.Unsubscribe(attachment=1))
        drafter.send_frame(**delta(text.whole, len(text.prompt) + 3, text.answer[4:6]))
        await drafter.received_all(router.session)
        assert (await described(verifier)).refused_frames == before + 4
        report = await router.step()
        assert (report.verified, report.drafters) == (0, 0)
        assert {kind for kind, _ in drafter.inbox.frames} <= {"heartbeat"}
