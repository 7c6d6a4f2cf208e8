"""TLS connections to the gateway: they count from the moment of accept, and have to agree on TLS in time.

uvicorn and asyncio know a connection only when its handshake has ended.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

from outrider.gateway.connections import BoundedConnection

HANDSHAKE_S = 10.0  # time for TLS, from accept


class TlsConnections:
    """The open TLS connections, those in their handshake included. Those beyond `most` are closed at once."""

    def __init__(self, context: ssl.SSLContext, http: Callable[..., BoundedConnection], most: int) -> None:
        """`http` makes the protocol inside a connection."""
        self.context = context
        self.most = most
        self.opened: set[TlsConnection] = set()
        self._http = http

    def accept(self, **named: Any) -> TlsConnection:
        """Return the protocol of a connection that is accepted now."""
        return TlsConnection(self._http(**named), self)

    def abort(self) -> None:
        """Close all connections."""
        for connection in [*self.opened]:
            connection.abort()


class TlsConnection(asyncio.Protocol):
    """A connection that agrees on TLS within `HANDSHAKE_S`, and then passes everything on to `http`."""

    def __init__(self, http: BoundedConnection, connections: TlsConnections) -> None:
        self._http = http
        self._connections = connections
        self._early: list[bytes] = []  # what came with the end of the handshake
        self._agreed = False
        self._agreeing: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None  # the one below TLS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin the handshake, or close the connection if there are too many."""
        self._transport = transport
        self._connections.opened.add(self)
        if len(self._connections.opened) > self._connections.most:
            transport.abort()
        else:
            self._agreeing = asyncio.create_task(self._agree(transport))

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._connections.opened.discard(self)
        if self._agreed:
            self._http.connection_lost(exc)
        elif self._agreeing is not None:
            self._agreeing.cancel()

    def data_received(self, data: bytes) -> None:
        """Pass data on."""
        if self._agreed:
            self._http.data_received(data)
        else:
            self._early.append(data)

    def eof_received(self) -> None:
        """Pass the end of the client's data on."""
        self._http.eof_received()

    def pause_writing(self) -> None:
        """Pass on that the client does not read."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """Pass on that the client reads."""
        self._http.resume_writing()

    def abort(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.abort()

    async def _agree(self, transport: asyncio.Transport) -> None:
        loop, context = asyncio.get_running_loop(), self._connections.context
        try:
            secured = await loop.start_tls(
                transport, self, context, server_side=True, ssl_handshake_timeout=HANDSHAKE_S
            )
            if secured is None or secured.is_closing():
                raise ConnectionAbortedError
        except BaseException as error:
            self._connections.opened.discard(self)
            transport.abort()
            if not isinstance(error, OSError):  # an OSError: no TLS, another certificate, or too late
                raise
            return
        self._agreed = True
        self._http.connection_made(secured)
        for data in self._early:
            self._http.data_received(data)
        self._early.clear()
