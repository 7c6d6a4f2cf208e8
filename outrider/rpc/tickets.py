"""Tickets: a router's permission for one drafter to subscribe to one session at one upstream, for a limited time."""

from __future__ import annotations

import hashlib
import hmac
import time
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from outrider.errors import Forbidden
from outrider.v1 import types_pb2

TICKET_S = 60.0  # a later subscription needs a fresh ticket from the router


@dataclass(frozen=True, slots=True)
class Permit:
    """What a ticket permits."""

    session_id: str
    tenant: str
    drafter_id: str
    upstream_id: str
    epoch: int


def sign(key: bytes, permit: Permit, valid_s: float = TICKET_S) -> bytes:
    """Return the serialized ticket."""
    ticket = types_pb2.Ticket(
        session_id=permit.session_id,
        tenant=permit.tenant,
        drafter_id=permit.drafter_id,
        upstream_id=permit.upstream_id,
        epoch=permit.epoch,
        expires_ms=round((time.time() + valid_s) * 1000),
    ).SerializeToString()
    return types_pb2.SignedTicket(ticket=ticket, mac=_mac(key, ticket)).SerializeToString()


def check(key: bytes, blob: bytes, permit: Permit) -> None:
    """Raises Forbidden unless `blob` is a ticket under our key for exactly this permit, and has not expired."""
    try:
        signed = types_pb2.SignedTicket.FromString(blob)
        if not hmac.compare_digest(signed.mac, _mac(key, signed.ticket)):
            raise Forbidden("forged ticket: the router and this upstream must use one Redis")
        ticket = types_pb2.Ticket.FromString(signed.ticket)
    except DecodeError:
        raise Forbidden("malformed ticket") from None
    granted = Permit(ticket.session_id, ticket.tenant, ticket.drafter_id, ticket.upstream_id, ticket.epoch)
    if granted != permit:
        raise Forbidden("foreign ticket: it is for another session, tenant, drafter, upstream or epoch")
    if ticket.expires_ms < time.time() * 1000:
        raise Forbidden("expired ticket: the router gives a fresh one with its next Attach")


def _mac(key: bytes, ticket: bytes) -> bytes:
    return hmac.digest(key, ticket, hashlib.sha256)
