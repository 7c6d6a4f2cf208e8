"""A ticket permits one drafter one session at one upstream, for a while, and only a router's key makes one."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import Forbidden
from outrider.v1 import types_pb2
from outrider.wire.tickets import PUBLIC_KEY_BYTES, Permit, TicketSigner, key_of
from outrider.wire.tickets import check as check_ticket

ROUTER, STRANGER = TicketSigner(time.time), TicketSigner(time.time)
PERMIT = Permit("session", "tenant", "drafter-1", "verifier-1", 3)


def check(
    ticket: bytes, permit: Permit = PERMIT, *, router: TicketSigner = ROUTER, now: Callable[[], float] = time.time
) -> None:
    check_ticket(lambda key: key == router.public_key, ticket, permit, now)


def changed(whole: bytes, **fields: bytes) -> bytes:
    """The ticket with other fields beside what its router signed, or instead of it."""
    signed = types_pb2.SignedTicket.FromString(whole)
    for name, value in fields.items():
        setattr(signed, name, value)
    return signed.SerializeToString()


def test_a_good_ticket_is_good_and_names_its_key() -> None:  # bites: `check` raises where it is not
    check(ROUTER.sign(PERMIT))
    assert key_of(ROUTER.sign(PERMIT)) == ROUTER.public_key
    assert len(ROUTER.public_key) == PUBLIC_KEY_BYTES


@pytest.mark.parametrize(
    "change",
    [{"session_id": "x"}, {"tenant": "x"}, {"drafter_id": "x"}, {"upstream_id": "x"}, {"epoch": 4}],
    ids=lambda change: next(iter(change)),
)
def test_a_ticket_is_good_for_no_other_session_tenant_drafter_upstream_or_epoch(change: dict[str, object]) -> None:
    with pytest.raises(Forbidden, match="foreign"):
        check(ROUTER.sign(replace(PERMIT, **change)))  # type: ignore[arg-type]


def test_only_the_holder_of_a_router_s_private_key_makes_one() -> None:
    forgeries = [
        STRANGER.sign(PERMIT),
        changed(STRANGER.sign(PERMIT), public_key=ROUTER.public_key),
        changed(ROUTER.sign(PERMIT), signature=b""),
        changed(ROUTER.sign(PERMIT), signature=bytes(64)),
        changed(ROUTER.sign(PERMIT), public_key=b""),
        changed(
            ROUTER.sign(PERMIT, valid_s=1), signature=types_pb2.SignedTicket.FromString(ROUTER.sign(PERMIT)).signature
        ),
    ]
    for forgery in forgeries:
        with pytest.raises(Forbidden, match="forged"):
            check(forgery)


def test_a_malformed_listed_key_makes_no_ticket_good() -> None:
    for key in (b"", b"short", b"\xff" * 32, b"k" * 33):
        with pytest.raises(Forbidden, match="forged"):
            check_ticket(lambda _: True, changed(ROUTER.sign(PERMIT), public_key=key), PERMIT, time.time)


def test_an_expired_one_is_refused_as_expired() -> None:
    with pytest.raises(Forbidden, match="expired"):
        check(ROUTER.sign(PERMIT, valid_s=-0.1))


def test_a_ticket_is_good_for_its_signed_duration() -> None:
    router = TicketSigner(lambda: 1000.0)
    for ticket, last in ((router.sign(PERMIT), 1060.0), (router.sign(PERMIT, valid_s=0.25), 1000.25)):
        check(ticket, router=router, now=lambda last=last: last)  # type: ignore[misc]
        with pytest.raises(Forbidden, match="expired"):
            check(ticket, router=router, now=lambda last=last: last + 0.001)  # type: ignore[misc]


def test_a_refused_ticket_is_reported_with_the_remedy() -> None:
    wrong = {
        b"\xff": "malformed ticket",
        STRANGER.sign(PERMIT): "forged ticket: its key is no router's; the router and this upstream must use one Redis",
        changed(ROUTER.sign(PERMIT), ticket=b"\xff"): "forged ticket: it was changed after its router signed it",
        ROUTER.sign(replace(PERMIT, epoch=4)): "foreign ticket: it is for another session, tenant, drafter, upstream "
        "or epoch",
        ROUTER.sign(PERMIT, valid_s=-0.1): "expired ticket: the router gives a fresh one with its next Attach",
    }
    for ticket, problem in wrong.items():
        with pytest.raises(Forbidden) as refusal:
            check(ticket)
        assert str(refusal.value) == problem


def test_signed_bytes_that_are_no_ticket_are_malformed() -> None:
    junk = types_pb2.SignedTicket(
        ticket=b"\xff", public_key=ROUTER.public_key, signature=ROUTER._private_key.sign(b"\xff")
    ).SerializeToString()
    with pytest.raises(Forbidden, match="malformed"):
        check(junk)


def test_a_longer_life_cannot_be_written_into_one() -> None:
    expired = ROUTER.sign(PERMIT, valid_s=-0.1)
    inner = types_pb2.Ticket.FromString(types_pb2.SignedTicket.FromString(expired).ticket)
    inner.expires_ms += 10**9
    with pytest.raises(Forbidden, match="forged"):
        check(changed(expired, ticket=inner.SerializeToString()))


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(blob: bytes) -> None:
    with pytest.raises(Forbidden):
        check(blob)
