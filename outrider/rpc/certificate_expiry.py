"""When a server's certificate expires: for a metric, and a warning in time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

WARN_S = 7 * 24 * 3600.0  # before a certificate expires
CHECK_S = 3600.0  # between two checks
REPEAT_S = 24 * 3600.0  # between two warnings

log = logging.getLogger(__name__)


class CertificateExpiry:
    """Watches the certificate that a server uses."""

    def __init__(self, present: Callable[[], bytes]) -> None:
        """`present` returns the certificate that new connections get now, in PEM, with those that follow it in a
        chain."""
        self._present = present
        self._warned_at: float | None = None

    def at(self) -> float:
        """Return the Unix time at which the certificate, or another one of its chain, expires."""
        from cryptography import x509  # servers without TLS do not load it

        chain = x509.load_pem_x509_certificates(self._present())
        return min(each.not_valid_after_utc.timestamp() for each in chain)

    def check(self) -> None:
        """Warn, once a day, of a certificate that expires within a week or has expired."""
        left, now = self.at() - time.time(), time.monotonic()
        if left >= WARN_S:
            self._warned_at = None
        elif self._warned_at is None or now - self._warned_at >= REPEAT_S:
            self._warned_at = now
            log.warning(
                "this server's certificate %s: renew it, by `outrider certs FOLDER --renew` where your CA is of "
                "`outrider certs`; new files are used without a restart",
                f"expires in {left / 3600:.0f} hours" if left > 0 else "has expired, and new connections are refused",
            )

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            self.check()
            await asyncio.sleep(CHECK_S)
