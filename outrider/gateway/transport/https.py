"""The gateway's certificate, of which each new connection gets the present content."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Any

# Without a password, an encrypted key would prompt on the terminal.
NO_PASSWORD = "none"

log = logging.getLogger(__name__)


class PresentCertificate:
    """Gives new connections of a TLS context the certificate that the files hold now.

    Files that do not fit each other, as while they are being replaced, are not used.
    """

    def __init__(self, context: ssl.SSLContext, cert: Path, key: Path) -> None:
        """`context` has been loaded from the files. Raises OSError."""
        self._cert = cert
        self._key = key
        self._contents = self._read()
        self._context = context
        context.sni_callback = self._choose  # it is called for clients that name no server, too

    @property
    def pem(self) -> bytes:
        """The certificate that new connections get."""
        self._renew()
        return self._contents[0]

    def _read(self) -> tuple[bytes, bytes]:
        return self._cert.read_bytes(), self._key.read_bytes()

    def _renew(self) -> None:
        try:
            contents = self._read()
            if contents == self._contents:
                return
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._cert, self._key, NO_PASSWORD)
        except (ssl.SSLError, OSError) as error:
            log.warning("the certificate in use stays: %s and %s: %s", self._cert, self._key, error)
            return
        self._contents, self._context = contents, context
        log.info("the certificate is renewed: %s", self._cert)

    def _choose(self, connection: Any, name: str | None, context: ssl.SSLContext) -> None:
        self._renew()
        connection.context = self._context
