"""A ticket permits one drafter one session at one upstream, for a while, and only a holder of the key makes one."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import Forbidden
from outrider.rpc.tickets import Permit, check, sign
from outrider.v1 import types_pb2

KEY = bytes(range(32))
PERMIT = Permit("session", "tenant", "drafter-1", "verifier-1", 3)


def test_a_good_ticket_is_good() -> None:  # bites: `check` raises where it is not
    check(KEY, sign(KEY, PERMIT), PERMIT)


@pytest.mark.parametrize(
    "change",
    [{"session_id": "x"}, {"tenant": "x"}, {"drafter_id": "x"}, {"upstream_id": "x"}, {"epoch": 4}],
    ids=lambda change: next(iter(change)),
)
def test_it_is_good_for_nothing_else(change: dict[str, object]) -> None:
    with pytest.raises(Forbidden, match="foreign"):
        check(KEY, sign(KEY, replace(PERMIT, **change)), PERMIT)  # type: ignore[arg-type]


def test_another_key_is_a_forgery() -> None:
    with pytest.raises(Forbidden, match="forged"):
        check(KEY, sign(b"another key", PERMIT), PERMIT)


def test_an_expired_one_is_refused_as_expired() -> None:
    with pytest.raises(Forbidden, match="expired"):
        check(KEY, sign(KEY, PERMIT, valid_s=-0.1), PERMIT)


def test_it_is_good_for_as_long_as_it_was_signed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.0)
    usual, brief = sign(KEY, PERMIT), sign(KEY, PERMIT, valid_s=0.25)
    for ticket, last in ((usual, 1060.0), (brief, 1000.25)):
        monkeypatch.setattr("time.time", lambda last=last: last)
        check(KEY, ticket, PERMIT)
        monkeypatch.setattr("time.time", lambda last=last: last + 0.001)
        with pytest.raises(Forbidden, match="expired"):
            check(KEY, ticket, PERMIT)


def test_a_refusal_names_what_to_do() -> None:
    wrong = {
        b"\xff": "malformed ticket",
        sign(b"another key", PERMIT): "forged ticket: the router and this upstream must use one Redis",
        sign(KEY, replace(PERMIT, epoch=4)): "foreign ticket: it is for another session, tenant, drafter, upstream or "
        "epoch",
        sign(KEY, PERMIT, valid_s=-0.1): "expired ticket: the router gives a fresh one with its next Attach",
    }
    for ticket, problem in wrong.items():
        with pytest.raises(Forbidden) as refusal:
            check(KEY, ticket, PERMIT)
        assert str(refusal.value) == problem


def test_a_longer_life_cannot_be_written_into_one() -> None:
    signed = types_pb2.SignedTicket.FromString(sign(KEY, PERMIT, valid_s=-0.1))
    inner = types_pb2.Ticket.FromString(signed.ticket)
    inner.expires_ms += 10**9
    forged = types_pb2.SignedTicket(ticket=inner.SerializeToString(), mac=signed.mac).SerializeToString()
    with pytest.raises(Forbidden, match="forged"):
        check(KEY, forged, PERMIT)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(blob: bytes) -> None:
    with pytest.raises(Forbidden):
        check(KEY, blob, PERMIT)
