"""Tickets: a router's permission for one drafter to subscribe to one session at one upstream, for a limited time.

Each router signs with a key pair of its own, whose public key it lists in Redis. Upstreams check with the public keys
alone, so neither they nor the drafters that carry tickets can make one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from google.protobuf.message import DecodeError

from outrider.errors import Forbidden
from outrider.v1 import types_pb2

TICKET_S = 60.0  # a later subscription needs a fresh ticket from the router
PUBLIC_KEY_BYTES = 32
OWN_TENANT = "@upstream"  # of sessions that an engine attaches to drafters itself, with tickets of its own


@dataclass(frozen=True, slots=True)
class Permit:
    """What a ticket permits."""

    session_id: str
    tenant: str
    drafter_id: str
    upstream_id: str
    epoch: int


class TicketSigner:
    """A new key pair. Its private key never leaves this object."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` returns the time, in seconds since 1970, by the clock that upstreams check tickets by: Redis'."""
        self._now = now
        self._private_key = Ed25519PrivateKey.generate()
        self.public_key = self._private_key.public_key().public_bytes_raw()

    def sign(self, permit: Permit, valid_s: float = TICKET_S) -> bytes:
        """Return the serialized ticket."""
        ticket = types_pb2.Ticket(
            session_id=permit.session_id,
            tenant=permit.tenant,
            drafter_id=permit.drafter_id,
            upstream_id=permit.upstream_id,
            epoch=permit.epoch,
            expires_ms=round((self._now() + valid_s) * 1000),
        ).SerializeToString()
        return types_pb2.SignedTicket(
            ticket=ticket, public_key=self.public_key, signature=self._private_key.sign(ticket)
        ).SerializeToString()


def key_of(blob: bytes) -> bytes:
    """Return the public key that a ticket names. Raises Forbidden for bytes that are no ticket."""
    return _parse(blob).public_key


def check(trusts: Callable[[bytes], bool], blob: bytes, permit: Permit, now: Callable[[], float]) -> None:
    """Raise Forbidden unless `blob` is a ticket for exactly this permit, has not expired, and is signed by a router's
    key. `trusts`: whether a public key is a router's; `now`: as for `TicketSigner`."""
    signed = _parse(blob)
    if not trusts(signed.public_key):
        raise Forbidden("forged ticket: its key is no router's; the router and this upstream must use one Redis")
    try:
        Ed25519PublicKey.from_public_bytes(signed.public_key).verify(signed.signature, signed.ticket)
        ticket = types_pb2.Ticket.FromString(signed.ticket)
    except (InvalidSignature, ValueError):  # ValueError: what is listed is no key
        raise Forbidden("forged ticket: it was changed after its router signed it") from None
    except DecodeError:
        raise Forbidden("malformed ticket") from None
    granted = Permit(ticket.session_id, ticket.tenant, ticket.drafter_id, ticket.upstream_id, ticket.epoch)
    if granted != permit:
        raise Forbidden("foreign ticket: it is for another session, tenant, drafter, upstream or epoch")
    if ticket.expires_ms < now() * 1000:
        raise Forbidden("expired ticket: the router gives a fresh one with its next Attach")


def _parse(blob: bytes) -> types_pb2.SignedTicket:
    try:
        return types_pb2.SignedTicket.FromString(blob)
    except DecodeError:
        raise Forbidden("malformed ticket") from None
