"""7. Trust."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import grpc
import grpc.aio
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from outrider.core.control.cost.budget import CostModel
from outrider.core.control.holds.arrival_model import ArrivalPatterns
from outrider.core.session.contract import Contract, Plan, PlanOverlap
from outrider.core.session.digest import EMPTY, extend
from outrider.core.tree.delta import Delta
from outrider.engine.kv.kv_slots import AcquiredSlot
from outrider.fleet.cluster import LocalCluster
from outrider.rpc.channels import LIVENESS, open_channel
from outrider.store.redis.client import connect
from outrider.v1 import drafter_pb2 as pb
from outrider.v1 import types_pb2
from outrider.wire.tickets import Permit, TicketSigner
from outrider.wire.types import plan_to_pb
from tests.e2e.mini_router import SIGNERS, described
from tests.e2e.protocol.conftest import Text
from tests.e2e.protocol.peers import RawDrafter, RawRouter, decoding, delta, drafting, hello_to
from tests.e2e.protocol.stream_probe import End, Inbox, end_of
from tests.e2e.protocol.upstreams import refused_by, upstream_of
from verifier_svc.scheduler import StepScheduler
from verifier_svc.session import SessionStart, VerifierSession

pytestmark = pytest.mark.asyncio(loop_scope="session")

# The values of docs/protocol.md.
REQUEST_BYTES = 6 * 2**20
MAX_DELTA_NODES = 1024
MAX_DRAFTERS = 16
MAX_REFUSED = 1000
SUBSCRIBE_BYTES = 4096

WIDE = plan_to_pb(Plan(version=1, depth=8, width=4, nodes=16, wait_us=0, overlap=PlanOverlap.ALWAYS))


class Bystander(NamedTuple):
    """A session with a drafter of its own, and how many frames were refused before anything went wrong."""

    router: RawRouter
    drafter: RawDrafter
    refused: int


@asynccontextmanager
async def unharmed(verifier: str, text: Text) -> AsyncIterator[Bystander]:
    """A session that generates its text with its drafter's help whatever the body does."""
    async with (
        decoding(verifier, tokens=text.prompt, contract=text.contract, plan=WIDE, window=8) as router,
        drafting(verifier) as drafter,
    ):
        await router.generated(8)
        await drafter.attach(router.session)
        before = await described(verifier)
        yield Bystander(router, drafter, before.refused_frames)
        await router.full()
        end = len(router.tokens) - len(text.prompt)
        drafter.send_frame(**delta(text.whole, len(router.tokens) - 1, text.answer[end : end + 4], first_id=100))
        await drafter.received_all(router.session)
        assert (await router.step()).accepted
        assert router.tokens == text.whole[: len(router.tokens)]
        assert not drafter.inbox.of("closed", 1)


async def test_a_public_key_that_redis_lists_checks_a_ticket_made_as_the_page_specifies(
    cluster: LocalCluster, verifier: str, text: Text
) -> None:
    private = Ed25519PrivateKey.generate()
    public = private.public_key().public_bytes_raw()
    assert len(public) == 32
    async with (
        decoding(verifier, tokens=text.prompt, contract=text.contract, window=1) as router,
        drafting(verifier) as drafter,
    ):
        ticket = types_pb2.Ticket(
            session_id=router.session,
            drafter_id=drafter.name,
            upstream_id=(await described(verifier)).worker_id,
            epoch=1,
            expires_ms=int(time.time() * 1000) + 60_000,
        ).SerializeToString()
        signed = types_pb2.SignedTicket(ticket=ticket, public_key=public, signature=private.sign(ticket))
        blob = signed.SerializeToString()
        attachment = await drafter.subscribe(router.session, signed=blob)
        assert (await drafter.inbox.take("closed", attachment)).reason.startswith("forged ticket")
        async with aclosing(connect(cluster.redis_url)) as redis:
            assert await redis.zcard("outrider:{tickets}:keys")  # the router's, at least
            await redis.zadd("outrider:{tickets}:keys", {public: (time.time() + 60) * 1000})
        attachment = await drafter.subscribe(router.session, signed=blob)
        await drafter.inbox.take("snapshot", attachment)


TICKETS: dict[str, tuple[dict[str, Any], str]] = {
    "of another session": ({"session_id": "another"}, "foreign ticket"),
    "of another tenant": ({"tenant": "another"}, "foreign ticket"),
    "of another drafter": ({"drafter_id": "another"}, "foreign ticket"),
    "of another upstream": ({"upstream_id": "another"}, "foreign ticket"),
    "of another epoch": ({"epoch": 2}, "foreign ticket"),
    "that has expired": ({"valid_s": -0.001}, "expired ticket"),
    "of a key that nobody listed": ({"signer": TicketSigner(time.time)}, "forged ticket"),
    "that was changed": ({"tail": b"\x28\x02"}, "forged ticket"),
    "that does not exist": ({"blob": b""}, "forged ticket"),
    "that is no message": ({"blob": b"\xff\xff\xff"}, "malformed ticket"),
}


@pytest.mark.parametrize(("changes", "reason"), TICKETS.values(), ids=TICKETS)
async def test_a_bad_ticket_closes_its_attachment_alone(
    verifier: str, text: Text, changes: dict[str, Any], reason: str
) -> None:
    async with (
        unharmed(verifier, text) as bystander,
        decoding(verifier, tokens=text.prompt, contract=text.contract, window=1) as router,
        drafting(verifier) as drafter,
    ):
        upstream = (await described(verifier)).worker_id
        fields = {"session_id": router.session, "tenant": "", "drafter_id": drafter.name, "upstream_id": upstream}
        altered = {name: value for name, value in changes.items() if name in Permit.__slots__}
        permit = Permit(**{**fields, "epoch": 1, **altered})
        blob = changes.get("signer", SIGNERS[verifier]).sign(permit, changes.get("valid_s", 60.0))
        if "tail" in changes:
            signed = types_pb2.SignedTicket.FromString(blob)
            signed.ticket += changes["tail"]
            blob = signed.SerializeToString()
        attachment = await drafter.subscribe(router.session, signed=changes.get("blob", blob))
        assert (await drafter.inbox.take("closed", attachment)).reason.startswith(reason)
        assert (await described(verifier)).refused_frames == bystander.refused + 1
        await drafter.attach(router.session)  # nothing but the attachment was lost
        await router.acknowledge(1)
        await router.generated(2)
        assert router.reports[-1].drafters == 1


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "1025 nodes": ({"tokens": [1] * 1025, "parents": [0] * 1025, "edges": bytes(1025)}, f"at most {MAX_DELTA_NODES}"),
    "fewer parents than tokens": ({"parents": [0]}, "1 parents"),
    "fewer edges than tokens": ({"edges": b""}, "0 edges"),
    "more edges than tokens": ({"edges": b"aaaa"}, "4 edges"),
    "a token outside the vocabulary": ({"tokens": [1, 4096, 2]}, "4095"),
    "id 0": ({"first_id": 0}, "id 0 is the root"),
    "a parent that would be before the root": ({"parents": [1, 0, 0]}, "names a parent"),
    "a root ahead of what is committed": ({"root_position": 2**40}, "the last committed"),
    "a node beyond the credit": ({"first_id": 511}, "beyond the credit"),
    "the largest of all ids": ({"first_id": 2**64 - 1}, "beyond the credit"),
}


@pytest.mark.parametrize(("changes", "reason"), FAULTS.values(), ids=FAULTS)
async def test_a_malformed_delta_closes_its_attachment_alone(
    verifier: str, text: Text, changes: dict[str, Any], reason: str
) -> None:
    async with (
        unharmed(verifier, text) as bystander,
        decoding(verifier, tokens=text.prompt, contract=text.contract, plan=WIDE, window=4) as router,
        drafting(verifier) as drafter,
    ):
        await router.generated(4)
        await drafter.attach(router.session)
        await drafter.subscribe(bystander.router.session)
        await drafter.inbox.take("snapshot", 2)
        root = len(text.prompt) + 3
        drafter.send_frame(**delta(text.whole, root, **{"tokens": [5, 6, 7], "edges": bytes(3)} | changes))
        closed = await drafter.inbox.take("closed", 1)
        assert closed.reason.startswith("malformed: ")
        assert reason in closed.reason
        assert (await described(verifier)).refused_frames == bystander.refused + 1
        drafter.send_frame(**delta(text.whole, root, text.answer[4:8]))  # of an attachment that has ended
        await drafter.received_all(router.session)
        assert (await described(verifier)).refused_frames == bystander.refused + 3
        await router.acknowledge(4)
        assert await router.generated(8) == text.answer[:8]
        assert router.reports[-1].drafters == 0
        assert not drafter.inbox.of("closed", 2)  # its other session on this stream


async def test_the_seventeenth_drafter_of_a_session_is_refused(verifier: str, text: Text) -> None:
    async with AsyncExitStack() as stack:
        bystander = await stack.enter_async_context(unharmed(verifier, text))
        router = await stack.enter_async_context(
            decoding(verifier, tokens=text.prompt, contract=text.contract, window=1)
        )
        for _ in range(MAX_DRAFTERS):
            drafter = await stack.enter_async_context(drafting(verifier))
            await drafter.attach(router.session)
        late = await stack.enter_async_context(drafting(verifier))
        await late.subscribe(router.session)
        assert f"at most {MAX_DRAFTERS} drafters" in (await late.inbox.take("closed", 1)).reason
        assert (await described(verifier)).refused_frames == bystander.refused + 1
        drafter.send_frame(unsubscribe=pb.Unsubscribe(attachment=1))
        await drafter.received_all(router.session)
        await late.attach(router.session)


async def test_an_oversized_subscription_is_refused_before_it_waits(verifier: str, text: Text) -> None:
    async with unharmed(verifier, text) as bystander, drafting(verifier) as drafter:
        await drafter.subscribe("x" * SUBSCRIBE_BYTES, signed=b"")
        assert (await drafter.inbox.take("closed", 1)).reason.startswith("malformed: ")
        assert (await described(verifier)).refused_frames == bystander.refused + 1


Send = Callable[[str, RawDrafter], Awaitable[None]]


async def _no_hello(verifier: str, drafter: RawDrafter) -> None:
    drafter.send_frame(heartbeat=types_pb2.Heartbeat())


async def _empty_first(verifier: str, drafter: RawDrafter) -> None:
    drafter.send_frame()


async def _nothing_at_all(verifier: str, drafter: RawDrafter) -> None:
    drafter.finish()


async def _second_hello(verifier: str, drafter: RawDrafter) -> None:
    for _ in range(2):
        drafter.send_frame(hello=await hello_to(verifier, drafter.name))


async def _empty_later(verifier: str, drafter: RawDrafter) -> None:
    drafter.send_frame(hello=await hello_to(verifier, drafter.name))
    drafter.send_frame()


async def _other_tokenizer(verifier: str, drafter: RawDrafter) -> None:
    drafter.send_frame(hello=await hello_to(verifier, drafter.name, tokenizer_digest=b"y" * 16))


@pytest.mark.parametrize(
    ("send", "code", "details"),
    [
        (_no_hello, grpc.StatusCode.INVALID_ARGUMENT, "hello"),
        (_empty_first, grpc.StatusCode.INVALID_ARGUMENT, "hello"),
        (_nothing_at_all, grpc.StatusCode.INVALID_ARGUMENT, "hello"),
        (_second_hello, grpc.StatusCode.INVALID_ARGUMENT, "hello"),
        (_empty_later, grpc.StatusCode.INVALID_ARGUMENT, "frame"),
        (_other_tokenizer, grpc.StatusCode.FAILED_PRECONDITION, "tokenizer_digest"),
    ],
)
async def test_a_stream_that_is_misused_ends(
    verifier: str, text: Text, send: Send, code: grpc.StatusCode, details: str
) -> None:
    async with unharmed(verifier, text) as bystander, drafting(verifier, greets=False) as drafter:
        streams = (await described(verifier)).drafters
        await send(verifier, drafter)
        end = await drafter.inbox.end()
        assert end.code is code
        assert details in end.details
        there = await described(verifier)
        assert there.refused_frames == bystander.refused + 1
        assert there.drafters <= streams


async def test_a_flood_of_refused_frames_ends_its_stream_and_no_other(verifier: str, text: Text) -> None:
    async with (
        unharmed(verifier, text) as bystander,
        drafting(verifier) as flooding,
        drafting(verifier) as clumsy,
        drafting(verifier) as busy,
    ):
        nothing = delta(text.whole, 0, [1])
        for _ in range(MAX_REFUSED):
            flooding.send_frame(**nothing)
        await flooding.subscribe(bystander.router.session)  # a good frame: the count begins anew
        await flooding.inbox.take("snapshot")
        flooding.beats = False  # a heartbeat would begin the count anew, or meet the end of the stream
        flooding.send_frame(unsubscribe=pb.Unsubscribe(attachment=1))
        for _ in range(MAX_REFUSED):
            flooding.send_frame(**nothing)
        for number in range(MAX_REFUSED + 50):  # refused ones between good ones
            busy.send_frame(**nothing)
            if number % 500 == 0:
                busy.send_frame(heartbeat=types_pb2.Heartbeat())
        clumsy.send_frame(**nothing)
        await clumsy.received_all(bystander.router.session)
        await busy.received_all(bystander.router.session)
        assert flooding.inbox.open
        flooding.send_frame(**nothing)
        end = await flooding.inbox.end()
        assert (end.code, str(MAX_REFUSED) in end.details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        refused = (await described(verifier)).refused_frames - bystander.refused
        assert refused == 2 * MAX_REFUSED + 1 + MAX_REFUSED + 50 + 1 + 2
        clumsy.send_frame(**nothing)  # one more than a thousand since its last good frame, but not its own
        await clumsy.received_all(bystander.router.session)
        assert clumsy.inbox.open
        assert busy.inbox.open


@pytest.mark.parametrize("method", ["/outrider.v1.TreeSink/Draft", "/outrider.v1.Verifier/Decode"])
async def test_a_message_above_6_mib_and_bytes_that_are_no_message_end_their_stream(
    verifier: str, text: Text, method: str
) -> None:
    limit = ("grpc.max_send_message_length", -1)
    options = (*(option for option in LIVENESS if option[0] != limit[0]), limit)
    async with (
        unharmed(verifier, text) as bystander,
        grpc.aio.insecure_channel(verifier, options=options) as channel,
    ):
        call = channel.stream_stream(method, request_serializer=bytes, response_deserializer=bytes)
        too_large = await status(call, bytes(REQUEST_BYTES + 1))
        assert too_large.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in too_large.details
        for blob in (b"\xff" * 50, b"\x0a\xff\xff\xff\xff\x0f", b"\x22\x02\x08"):
            broken = await status(call, blob)
            assert broken.code is grpc.StatusCode.INVALID_ARGUMENT
            assert broken.metadata["outrider-error"] == "InvalidRequest"
        refused = (await described(verifier)).refused_frames - bystander.refused
        assert (refused >= 3) == method.endswith("Draft")


async def status(call: Any, blob: bytes) -> End:
    """How a call ends that sends one message."""

    async def messages() -> AsyncIterator[bytes]:
        yield blob
        await asyncio.sleep(10)

    inbox = Inbox("frame")
    stream = call(messages())
    try:
        async for _ in stream:
            pass
    except grpc.aio.AioRpcError as error:
        inbox.close(end_of(error))
    finally:
        stream.cancel()
    return await inbox.end()


async def test_bytes_that_are_not_even_http_harm_no_session(
    cluster: LocalCluster, verifier: str, drafter: str, text: Text
) -> None:
    async with unharmed(verifier, text):
        for address in (verifier, drafter, cluster.router_address):
            host, _, port = address.rpartition(":")
            for garbage in (
                b"GET / HTTP/1.1\r\n\r\n",
                b"\x00" * 4096,
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 999,
            ):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(garbage)
                try:
                    async with asyncio.timeout(5):
                        while await reader.read(4096):
                            pass
                except ConnectionResetError:
                    pass
                writer.close()
        async with open_channel(drafter) as channel:
            unary = channel.unary_unary("/outrider.v1.Drafter/Describe", request_serializer=bytes)
            with pytest.raises(grpc.aio.AioRpcError) as broken:
                await unary(b"\xff" * 10)
            assert broken.value.code() is grpc.StatusCode.UNKNOWN  # gRPC's own word
            assert await unary(b"")


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": [1, 2, 4096]},
        {"plan": types_pb2.Plan(depth=65)},
        {"contract": types_pb2.Contract(rule="shared-noise", max_tokens=0)},
        {"contract": types_pb2.Contract(rule="guess", max_tokens=5, top_p=1)},
    ],
    ids=["token", "plan", "contract", "rule"],
)
async def test_a_malformed_frame_of_an_upstream_is_counted_and_renews_the_subscription(
    drafter: str, text: Text, changes: dict[str, Any]
) -> None:
    async with upstream_of(drafter) as peer:
        before = await refused_by(peer.drafter)
        peer.stream.snapshot(**{"tokens": text.prompt} | changes)
        assert (await peer.stream.inbox.take("subscribe")).attachment == 2
        assert await refused_by(peer.drafter) == before + 1
        peer.stream.snapshot(text.prompt, attachment=2)
        await peer.stream.inbox.take("delta", 2)


async def test_an_overconfident_drafter_s_scores_fall_and_no_other_drafter_s_nodes_are_left_out(
    verifier: str, text: Text
) -> None:
    window, rounds, overrated = 6, 10, 80
    plan = plan_to_pb(Plan(version=1, depth=8, width=64, nodes=64, wait_us=0))
    opening = {"tokens": text.prompt, "contract": text.contract, "plan": plan, "window": window}
    async with (
        decoding(verifier, **opening) as first,
        decoding(verifier, **opening) as second,
        drafting(verifier) as overconfident,
        drafting(verifier) as beside,
        drafting(verifier) as elsewhere,
    ):
        for router, drafter in ((first, overconfident), (first, beside), (second, elsewhere)):
            await router.generated(window)
            await drafter.attach(router.session)
        accepted = []
        for turn in range(rounds):
            committed = window * (turn + 1)
            root, right = len(text.prompt) + committed - 1, text.answer[committed]
            wrong = [token for token in range(overrated + 1) if token != right][:overrated]
            overconfident.send_frame(
                **delta(text.whole, root, wrong, first_id=overrated * turn + 1, parents=[0] * overrated)
            )
            await overconfident.received_all(first.session)
            for router, drafter in ((first, beside), (second, elsewhere)):
                nodes = text.answer[committed : committed + 4]
                drafter.send_frame(**delta(text.whole, root, nodes, first_id=4 * turn + 1, edges=b"\x08" * 4))
                await drafter.received_all(router.session)
            reports = await asyncio.gather(first.step(), second.step())
            accepted.append([report.accepted for report in reports])
        assert first.tokens == second.tokens == text.whole[: len(first.tokens)]
        assert accepted[0][0] == 0  # eighty nodes that are certain leave no place for what is only likely
        assert all(here and there for here, there in accepted[-6:])


async def test_no_session_has_more_than_twice_its_fair_share_of_a_step_where_several_compete() -> None:
    engine: Any = SimpleNamespace(slots=4, treeless="", rewinds=True, memory=lambda *_: None)
    flat = CostModel([(2, 0.004), (256, 0.004)])  # so that every node is worth verifying
    loop = StepScheduler(engine, flat, prefill_chunk=128, max_nodes=64, publish=lambda *_: None)
    tokens = (1, 2, 3)
    sessions = []
    for number in range(4):
        terms = Contract(seed=1, max_tokens=100), Plan(version=1, depth=8, width=64, nodes=1024)
        place = AcquiredSlot(number, len(tokens) - 1, None)
        session = VerifierSession(
            SessionStart(f"s{number}", "", 1, tokens, 3, *terms, 64), place, 4096, ArrivalPatterns()
        )
        count = 5 if number else 300
        edge = -0.5 if number else 0.0
        session.tree.graft(1, Delta(2, extend(EMPTY, tokens), 1, (0,) * count, tuple(range(count)), (edge,) * count))
        sessions.append(session)
    step, budget = loop.choice.select(loop.choice.base_works(sessions), 0.0)
    assert [len(work.nodes) for work in step.works] == [2 * 64 // 4, 5, 5, 5]
    alone, _ = loop.choice.select(loop.choice.base_works(sessions[:1]), 0.0)
    assert [len(work.nodes) for work in alone.works] == [64]
    assert budget.nodes == 47
