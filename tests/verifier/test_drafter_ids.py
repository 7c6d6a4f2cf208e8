"""A drafter's id belongs to its certificate: a real server under TLS refuses every other, and no second certificate
takes the place of a drafter that is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.core.acceptance import ChildSampling, rule_of
from outrider.core.control.holds.arrival_model import ArrivalPatterns
from outrider.core.session.contract import RULES, SHARED_NOISE, Contract, Plan
from outrider.engine.kv.kv_slots import AcquiredSlot
from outrider.rpc.certificates import make
from outrider.rpc.channels import open_channel
from outrider.rpc.drafter_ids import new_drafter_id
from outrider.rpc.liveness import WorkClock
from outrider.rpc.server import serving
from outrider.rpc.tls import VERIFIER, Tls
from outrider.upstream.servicer import UpstreamServicer
from outrider.upstream.ticket_verifier import TicketVerifier
from outrider.v1 import drafter_pb2 as pb
from outrider.v1.drafter_pb2_grpc import TreeSinkStub
from outrider.wire.tickets import Permit, TicketSigner
from verifier_svc.session import SessionStart, VerifierSession

ROUTER = TicketSigner(time.time)
ALICE, UNNAMED = "alice-00c0ffee", "drafter-00c0ffee"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of one CA: of each role, of the drafters alice and bob."""
    made = tmp_path_factory.mktemp("certs")
    make(made, drafters=["alice", "bob"])
    return made


def certificate(folder: Path, name: str) -> Tls:
    read = Tls.read(folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key")
    assert read is not None
    return read


class Upstream:
    """A verifier's TreeSink with one session, on a real server."""

    def __init__(self, rule: str = SHARED_NOISE, trusted: Sequence[str] = ("drafter",)) -> None:
        self.progress = WorkClock()
        terms = Contract(seed=1, max_tokens=100, rule=rule), Plan(version=1, depth=8)
        self.session = VerifierSession(
            SessionStart("s", "t", 1, (1, 2, 3), 3, *terms, 64),
            AcquiredSlot(0, 2, None),
            4096,
            ArrivalPatterns(),
        )
        self.sessions = {"s": self.session}
        keys = TicketVerifier(self._keys, time.time)
        self.servicer = UpstreamServicer("verifier-1", b"tokenizer", keys, trusted=trusted)
        self.servicer.serve(self)

    def wake(self) -> None:
        """There is no scheduler."""

    def on_drafter_connected(self, drafter_id: str) -> None:
        """There is no scheduler."""

    def register(self, server: grpc.aio.Server) -> list[str]:
        return [self.servicer.register(server)]

    async def _keys(self) -> dict[bytes, float]:
        return {ROUTER.public_key: time.time() + 60}


@asynccontextmanager
async def upstream(tls: Tls | None, **terms: Any) -> AsyncIterator[tuple[Upstream, str]]:
    made = Upstream(**terms)
    reading = asyncio.create_task(made.servicer.read_ticket_keys())
    try:
        async with serving("127.0.0.1:0", made.register, drain_s=0, tls=tls) as address:
            yield made, address
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


@asynccontextmanager
async def greeted(address: str, tls: Tls | None, drafter_id: str) -> AsyncIterator[Any]:
    """A stream of a drafter that calls itself so, welcomed. Raises what the upstream ends it with."""
    async with open_channel(address, tls, VERIFIER) as channel:
        call = TreeSinkStub(channel).Draft()
        await call.write(pb.DraftUp(hello=pb.Hello(drafter_id=drafter_id, tokenizer_digest=b"tokenizer")))
        await received(call, "welcome")
        try:
            yield call
        finally:
            call.cancel()


async def received(call: Any, *kinds: str) -> Any:
    """The next frame of one of these kinds."""
    while (frame := await call.read()) is not grpc.aio.EOF:
        if frame.WhichOneof("frame") in kinds:
            return frame
    raise AssertionError("the stream has ended")


async def subscribed(call: Any, drafter_id: str, attachment: int = 1, *, ticket_for: str = "") -> str:
    """What a subscription with a good ticket gets: "snapshot", or the reason of its end."""
    ticket = ROUTER.sign(Permit("s", "t", ticket_for or drafter_id, "verifier-1", 1))
    await call.write(pb.DraftUp(subscribe=pb.Subscribe(session_id="s", epoch=1, attachment=attachment, ticket=ticket)))
    frame = await received(call, "snapshot", "closed")
    return frame.closed.reason if frame.HasField("closed") else "snapshot"


@pytest.mark.parametrize(
    ("who", "drafter_id"),
    [
        ("drafter-alice", "bob-00c0ffee"),
        ("drafter-alice", UNNAMED),
        ("drafter-alice", "alice"),
        ("drafter-alice", "alice-b-00c0ffee"),
        ("drafter-alice", "alice-00c0ffee0"),
        ("drafter-alice", ""),
        ("drafter", ALICE),
        ("drafter", "whatever"),
        ("drafter", "x" * 10_000),
    ],
)
async def test_a_drafter_id_of_another_certificate_ends_the_stream(folder: Path, who: str, drafter_id: str) -> None:
    async with upstream(certificate(folder, "verifier")) as (_, address):
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            async with greeted(address, certificate(folder, who), drafter_id):
                pass
        assert ended.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "drafter_id" in (ended.value.details() or "")


@pytest.mark.parametrize("who", ["drafter-alice", "drafter-bob", "drafter"])
async def test_a_new_drafter_id_matches_the_drafters_certificate(folder: Path, who: str) -> None:
    tls = certificate(folder, who)
    one, two = new_drafter_id(tls.cert), new_drafter_id(tls.cert)
    assert one != two
    assert one.rpartition("-")[0] == who.removeprefix("drafter-")
    async with (
        upstream(certificate(folder, "verifier")) as (_, address),
        greeted(address, tls, one) as call,
    ):
        assert await subscribed(call, one) == "snapshot"


async def test_a_ticket_is_valid_only_for_the_drafter_that_said_hello(folder: Path) -> None:
    async with (
        upstream(certificate(folder, "verifier")) as (there, address),
        greeted(address, certificate(folder, "drafter-bob"), "bob-00c0ffee") as call,
    ):
        assert (await subscribed(call, "bob-00c0ffee", ticket_for=ALICE)).startswith("foreign ticket")
        assert not there.session.subscriptions


async def test_a_second_certificate_does_not_replace_a_connected_drafter(folder: Path, tmp_path: Path) -> None:
    """Both certificates have the role alone, so both may be of any drafter without a name."""
    again = tmp_path / "again"
    make(again)
    both = tmp_path / "both.pem"
    both.write_bytes((folder / "ca.pem").read_bytes() + (again / "ca.pem").read_bytes())
    server = Tls.read(both, folder / "verifier.pem", folder / "verifier.key")
    second = Tls.read(folder / "ca.pem", again / "drafter.pem", again / "drafter.key")
    first = certificate(folder, "drafter")
    async with upstream(server) as (there, address):
        async with (
            greeted(address, second, UNNAMED) as idle,  # it has come first, and no ticket has admitted it
            greeted(address, first, UNNAMED) as call,
        ):
            assert await subscribed(call, UNNAMED) == "snapshot"
            assert (await subscribed(idle, UNNAMED)).startswith("foreign drafter")
            (kept,) = there.session.subscriptions
            assert await subscribed(call, UNNAMED, 2) == "snapshot"  # the first one goes on
            async with greeted(address, first, UNNAMED) as anew:  # it connects anew before its old stream has ended
                assert await subscribed(anew, UNNAMED) == "snapshot"
            assert kept in there.session.subscriptions
        async with greeted(address, second, UNNAMED) as call:  # the first one has gone
            while there.servicer.streams > 1:
                await asyncio.sleep(0.01)
            assert await subscribed(call, UNNAMED) == "snapshot"


async def test_certificates_that_name_a_drafter_are_all_its_own(folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    make(again, drafters=["alice"])
    both = tmp_path / "both.pem"
    both.write_bytes((folder / "ca.pem").read_bytes() + (again / "ca.pem").read_bytes())
    server = Tls.read(both, folder / "verifier.pem", folder / "verifier.key")
    renewed = Tls.read(folder / "ca.pem", again / "drafter-alice.pem", again / "drafter-alice.key")
    async with upstream(server) as (_, address), AsyncExitStack() as stack:
        for tls in (certificate(folder, "drafter-alice"), renewed):
            call = await stack.enter_async_context(greeted(address, tls, ALICE))
            assert await subscribed(call, ALICE) == "snapshot"


SAMPLED = [
    name for name in RULES if rule_of(Contract(seed=1, max_tokens=1, rule=name)).child_sampling is ChildSampling.SAMPLED
]


@pytest.mark.parametrize("rule", RULES)
async def test_rules_that_draw_from_q_have_trusted_drafters_alone(folder: Path, rule: str) -> None:
    """By default those whose certificate has no name of its own."""
    async with upstream(certificate(folder, "verifier"), rule=rule) as (there, address):
        async with greeted(address, certificate(folder, "drafter-alice"), ALICE) as call:
            reason = await subscribed(call, ALICE)
            assert reason.startswith("untrusted drafter: " + rule) if rule in SAMPLED else reason == "snapshot"
            assert bool(there.session.subscriptions) == (rule not in SAMPLED)
        async with greeted(address, certificate(folder, "drafter"), UNNAMED) as call:
            assert await subscribed(call, UNNAMED) == "snapshot"


@pytest.mark.parametrize("rule", SAMPLED)
async def test_an_operator_trusts_drafters_by_their_names(folder: Path, rule: str) -> None:
    async with upstream(certificate(folder, "verifier"), rule=rule, trusted=["alice"]) as (_, address):
        for who, drafter_id, trusted in (
            ("drafter-bob", "bob-00c0ffee", False),
            ("drafter", UNNAMED, False),
            ("drafter-alice", ALICE, True),
        ):
            async with greeted(address, certificate(folder, who), drafter_id) as call:
                assert (await subscribed(call, drafter_id) == "snapshot") is trusted
    async with upstream(None, rule=rule) as (_, address), greeted(address, None, ALICE) as call:
        assert await subscribed(call, ALICE) == "snapshot"  # without certificates a name is anybody's


def wanted_token(session: VerifierSession) -> pb.TreeDelta:
    """A child of the root that its drafter wants in the text, from a q with which the rules commit it always."""
    return pb.TreeDelta(
        attachment=1,
        epoch=1,
        root_position=2,
        root_digest=session.tree.digest,
        first_id=1,
        parents=[0],
        tokens=[7],
        edges=bytes(1),
        drawn=[pb.DrawnFrom(tokens=[7, 8], weights=[1, 65535])],
    )


@pytest.mark.parametrize("who", ["drafter-alice", "drafter"])
async def test_an_untrusted_drafter_puts_no_token_into_the_text_by_its_choice_of_q(folder: Path, who: str) -> None:
    drafter_id = ALICE if who == "drafter-alice" else UNNAMED
    async with (
        upstream(certificate(folder, "verifier"), rule="speculative-sampling") as (there, address),
        greeted(address, certificate(folder, who), drafter_id) as call,
    ):
        await subscribed(call, drafter_id)
        await call.write(pb.DraftUp(delta=wanted_token(there.session)))
        await subscribed(call, drafter_id, 2, ticket_for="nobody")  # all before it has been dealt with
        assert there.session.tree.size == (drafter_id == UNNAMED)


async def test_any_drafter_id_is_accepted_without_tls() -> None:
    async with upstream(None) as (_, address), greeted(address, None, "whatever") as call:
        assert await subscribed(call, "whatever") == "snapshot"


def test_a_certificate_without_names_is_for_a_drafter_without_one() -> None:
    assert new_drafter_id(None).startswith("drafter-")
