"""Which drafter ids a certificate is for.

A drafter's id is NAME-XXXXXXXX: a name and eight hexadecimal digits, new for each start. A certificate names drafters
by DNS names NAME.drafter.outrider; one that names none is for the name "drafter".
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import grpc.aio

from outrider.errors import Forbidden
from outrider.rpc.authorization import certificate_names
from outrider.rpc.tls import DRAFTER, ROUTER

UNNAMED = "drafter"
NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_ID = re.compile(rf"({NAME.pattern})-[0-9a-f]{{8}}")


def new_drafter_id(certificate: bytes | None) -> str:
    """Return an id for a drafter that starts with this certificate (PEM); None: it has none.

    The name is the first one of the certificate, in the order of the alphabet.
    """
    names: list[str] = []
    if certificate is not None:
        from cryptography import x509  # drafters without TLS do not load it

        leaf = x509.load_pem_x509_certificates(certificate)[0]
        with suppress(x509.ExtensionNotFound):
            found = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            names = _named(found.get_values_for_type(x509.DNSName))
    return f"{names[0] if names else UNNAMED}-{secrets.token_hex(4)}"


def is_drafter_id(text: str) -> bool:
    """Return whether a text has the form of a drafter's id."""
    return _ID.fullmatch(text) is not None


def name_of(drafter_id: str) -> str:
    """Return the name in a drafter's id. Only under certificates it is more than the drafter's word."""
    return drafter_id.rpartition("-")[0]


def holder_of(context: grpc.aio.ServicerContext[Any, Any], drafter_id: str) -> str:
    """Return who the caller is that calls itself by this id; all whom the CA lets share it are one.

    That is the name, where the certificate has it; else the certificate itself, because any drafter has the role. A
    caller without a certificate is the empty holder. What routers relay has one: they look at the ids at their gates.
    Raises Forbidden for an id that the certificate is not for.
    """
    certificates = [bytes(pem) for pem in context.auth_context().get("x509_pem_cert", ())]
    if not certificates:
        return ""
    if ROUTER in certificate_names(context):
        return "routers"
    names = _named(certificate_names(context))
    match = _ID.fullmatch(drafter_id)
    if match is None or match[1] not in (names or [UNNAMED]):
        allowed = " or ".join(f"{name}-XXXXXXXX" for name in names or [UNNAMED])
        raise Forbidden(
            f"drafter_id: {drafter_id[:80]!r} is not for the caller's certificate, which is for {allowed}; give the "
            f"drafter a certificate with its name under {DRAFTER}"
        )
    return f"name {match[1]}" if names else f"certificate {hashlib.sha256(certificates[0]).hexdigest()}"


def _named(dns_names: Iterable[str]) -> list[str]:
    """Return the drafters' names among a certificate's DNS names, in order."""
    suffix = f".{DRAFTER}"
    names = {name.removesuffix(suffix) for name in dns_names if name.endswith(suffix)}
    return sorted(name for name in names if NAME.fullmatch(name))
