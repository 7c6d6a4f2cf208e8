"""TLS connections to the gateway: they count from the moment of accept, and have to agree on TLS in time.

uvicorn and asyncio's own servers know a connection only when its handshake has ended.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Sized
from contextlib import suppress

HANDSHAKE_S = 10.0  # time for TLS, from accept
PAUSE_S = 0.1  # after an accept that failed, as without file descriptors


class TlsConnections:
    """Accepts TLS connections, at most `most` at a time: those in their handshake, and the `opened` ones."""

    def __init__(self, context: ssl.SSLContext, most: int) -> None:
        self._context = context
        self._most = most
        self._handshakes: set[asyncio.Task[None]] = set()

    async def accept(self, listening: socket.socket, serve: Callable[[], asyncio.Protocol], opened: Sized) -> None:
        """Accept connections until cancelled; then handshakes end, and open connections go on.

        `serve` makes the protocol of a connection, which adds itself to `opened` when its handshake has ended.
        """
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        try:
            while True:
                try:
                    accepted, _ = await loop.sock_accept(listening)
                except OSError:
                    await asyncio.sleep(PAUSE_S)
                    continue
                if len(self._handshakes) + len(opened) >= self._most:
                    accepted.close()
                    continue
                handshake = loop.create_task(self._agree(accepted, serve))
                self._handshakes.add(handshake)
                handshake.add_done_callback(self._handshakes.discard)
        finally:
            for handshake in self._handshakes:
                handshake.cancel()

    async def _agree(self, accepted: socket.socket, serve: Callable[[], asyncio.Protocol]) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):  # no TLS, another certificate, or too late: the connection is closed
            await loop.connect_accepted_socket(serve, accepted, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_S)
