"""TLS between the processes of a cluster: certificates, and the role names in them.

Within a cluster a certificate belongs to a *role*, not to a machine, because workers and their addresses come and go.
The role is a DNS name among the certificate's subject alternative names, and both sides check it: a caller of a
verifier requires `verifier.outrider`, and a server reads from its caller's certificate which methods the caller may
call (`authorization.py`). Clients check a router by its host name, as on the web.
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
UPSTREAM = "upstream.outrider"
SERVER = "server.outrider"  # any of the first three and an upstream, for callers that do not know the role in advance
NAMES: dict[str, tuple[str, ...]] = {  # DNS names in a role's certificate
    "router": (ROUTER, SERVER),
    "verifier": (VERIFIER, SERVER),
    "drafter": (DRAFTER, SERVER),
    "upstream": (UPSTREAM, SERVER),  # an engine that is not ours, with drafters of ours
    "gateway": (GATEWAY,),  # for HTTPS; it calls a router, which requires no certificate
    "redis": ("redis", "redis.outrider.svc"),  # the hosts by which servers know it; it calls nobody
    "client": (CLIENT,),  # `outrider describe`, dashboards, probes: they read and change nothing
}


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tls:
    """The PEM files of one side of a connection. Without a certificate it can only be a client of the router."""

    ca: bytes | None = None  # the trusted CA; None: the CAs of gRPC, which are the web's
    cert: bytes = b""
    key: bytes = field(default=b"", repr=False)
    files: tuple[Path, Path, Path] | None = field(default=None, repr=False)  # the files of ca, cert and key

    @classmethod
    def read(cls, ca: Path | None, cert: Path | None, key: Path | None) -> Self | None:
        """Read the files of a server or worker; None if none is named. Raises ConfigError, which names the file."""
        if ca is None and cert is None and key is None:
            return None
        if ca is None or cert is None or key is None:
            raise ConfigError("tls: ca, cert and key go together; `outrider certs` makes all three for each role")
        _check_authority(ca)
        files = ca, cert, key
        read = cls(*_read_files(files), files)
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(
                cert, key, password=""
            )  # without a password it would prompt
        except (ssl.SSLError, OSError):
            raise ConfigError(
                f"tls: {cert} and {key} must be a certificate and its own key, both in PEM and not encrypted"
            ) from None
        if _read_files(files) != (read.ca, read.cert, read.key):
            raise ConfigError(f"tls: {cert} and its key are being replaced; try again")
        return read

    def renewed(self) -> Self:
        """Return the present content of the files, for new connections; the object itself if nothing has changed.

        If the files do not match each other, as while they are being replaced, the old content stays in use.
        """
        if self.files is None:
            return self
        try:
            ca, cert, key = self.files
            if _read_files(self.files) == (self.ca, self.cert, self.key):
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
        """Return a client's TLS, which has no certificate. Raises ConfigError."""
        if ca is not None:
            _check_authority(ca)
        return cls(None if ca is None else _read_file("ca", ca))


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


_CLOSED_EARLY = (
    "the server closed the connection at once: it requires TLS, or it refuses this side's certificate, "
    "which is missing, has expired or is of another CA"
)
_ADVICE = (
    ("certificate has expired", "the server's certificate has expired; make new ones"),
    ("CERTIFICATE_VERIFY_FAILED", "the server's certificate is not of the CA that `ca` names; give both sides one CA"),
    ("Hostname Verification", "the server's certificate is for another role or host; give it its own"),
    ("WRONG_VERSION_NUMBER", "the server speaks no TLS; connect without, or give it a certificate"),
    ("Socket closed", _CLOSED_EARLY),
    ("Connection reset", _CLOSED_EARLY),
)


def connection_advice(details: str) -> str | None:
    """Return what is wrong if gRPC could not connect, and what to do; None for other failures."""
    if not details.startswith("failed to connect"):  # an established connection broke for other reasons
        return None
    return next((advice for sign, advice in _ADVICE if sign in details), None)


def _check_authority(ca: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca)
    except (ssl.SSLError, OSError) as error:
        reason = "holds no certificate in PEM" if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(f"tls: ca: {ca} {reason}; name the CA's certificate, ca.pem") from None


def _read_files(files: tuple[Path, Path, Path]) -> tuple[bytes, bytes, bytes]:
    ca, cert, key = files
    return _read_file("ca", ca), _read_file("cert", cert), _read_file("key", key)


def _read_file(what: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"tls: {what}: {file} cannot be read: {error.strerror or error}") from None
