"""TLS between the parts: certificates, and the names in them by which parts know each other.

Within a cluster a certificate is for a *role*, not for a machine: workers come and go, and their addresses with them.
So the role is a DNS name among the certificate's subject alternative names, and both sides look at it: who calls a
verifier asks for `verifier.outrider`, and a server reads from its caller's certificate what he may call (`roles.py`).
Clients know a router by its host's name, as the web does.
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Self

from outrider.errors import ConfigError

ROUTER, VERIFIER, DRAFTER, CLIENT = "router.outrider", "verifier.outrider", "drafter.outrider", "client.outrider"
GATEWAY = "gateway.outrider"
SERVER = "server.outrider"  # any of the first three: for callers that cannot know which they will find
NAMES: dict[str, tuple[str, ...]] = {  # what a role's certificate must hold
    "router": (ROUTER, SERVER),
    "verifier": (VERIFIER, SERVER),
    "drafter": (DRAFTER, SERVER),
    "gateway": (GATEWAY,),  # for HTTPS; it calls a router, which asks for no certificate
    "client": (CLIENT,),  # `outrider describe`, dashboards, probes: they look and change nothing
}


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tls:
    """What one side of a connection holds, in PEM. Without a certificate it can only be a client of the router."""

    ca: bytes | None = None  # whom it believes; None: whom gRPC does, which is the web's own
    cert: bytes = b""
    key: bytes = field(default=b"", repr=False)
    files: tuple[Path, Path, Path] | None = field(default=None, repr=False)  # where ca, cert and key came from

    @classmethod
    def read(cls, ca: Path | None, cert: Path | None, key: Path | None) -> Self | None:
        """A part's own, from its files; None when none is named. Raises ConfigError, which names the file."""
        if ca is None and cert is None and key is None:
            return None
        if ca is None or cert is None or key is None:
            raise ConfigError("tls: ca, cert and key go together; `outrider certs` makes all three for each role")
        _check_authority(ca)
        read = cls(_bytes("ca", ca), _bytes("cert", cert), _bytes("key", key), (ca, cert, key))
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, password="")  # or it would ask
        except (ssl.SSLError, OSError):
            raise ConfigError(
                f"tls: {cert} and {key} must be a certificate and its own key, both in PEM and not encrypted"
            ) from None
        return read

    def renewed(self) -> Self:
        """What its files hold by now, for connections from here on; itself where nothing has changed.

        Where they do not fit each other, as while they are being replaced, it stays what it was.
        """
        if self.files is None:
            return self
        try:
            ca, cert, key = self.files
            if (_bytes("ca", ca), _bytes("cert", cert), _bytes("key", key)) == (self.ca, self.cert, self.key):
                return self
            read = type(self).read(ca, cert, key)
        except ConfigError as error:
            log.warning("the certificate in use stays: %s", error)
            return self
        assert read is not None
        log.info("certificates are renewed: %s", cert)
        return read

    @classmethod
    def client(cls, ca: Path | None) -> Self:
        """A client's, which has no certificate. Raises ConfigError."""
        if ca is not None:
            _check_authority(ca)
        return cls(None if ca is None else _bytes("ca", ca))


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, for nobody else to listen to."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


_REFUSED = (
    "the server closed the connection before it said anything: it wants TLS, or it refuses this side's certificate, "
    "which is missing, has expired or is of another CA"
)
_ADVICE = (
    ("certificate has expired", "the server's certificate has expired; make new ones"),
    ("CERTIFICATE_VERIFY_FAILED", "the server's certificate is not of the CA that `ca` names; give both sides one CA"),
    ("Hostname Verification", "the server's certificate is for another role or host; give it its own"),
    ("WRONG_VERSION_NUMBER", "the server speaks no TLS; connect without, or give it a certificate"),
    ("Socket closed", _REFUSED),
    ("Connection reset", _REFUSED),
)


def explained(details: str) -> str | None:
    """What is wrong where gRPC could not agree on a connection, and what to do; None for other failures."""
    if not details.startswith("failed to connect"):  # a connection that was there broke for other reasons
        return None
    return next((advice for sign, advice in _ADVICE if sign in details), None)


def _check_authority(ca: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca)
    except (ssl.SSLError, OSError) as error:
        reason = "holds no certificate in PEM" if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(f"tls: ca: {ca} {reason}; name the CA's certificate, ca.pem") from None


def _bytes(what: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"tls: {what}: {file} cannot be read: {error.strerror or error}") from None
