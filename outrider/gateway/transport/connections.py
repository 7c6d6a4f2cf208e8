"""A connection to the gateway: one of at most `max_connections`, and closed if its client does not send a request."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

HEAD_S = 10.0  # time for the head of a request, from the connection's begin or the response before


class BoundedConnection(H11Protocol):
    """uvicorn's connection, with two bounds that uvicorn does not have.

    A connection beyond `max_connections` is closed at once. One whose next request has not begun within `HEAD_S` is
    closed, too: the client sends nothing, or the head of a request byte by byte, or more of a body that was refused.
    """

    def __init__(self, *given: Any, max_connections: int, **named: Any) -> None:
        super().__init__(*given, **named)
        self._max_connections = max_connections
        self._waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, or close the connection if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            transport.abort()
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        super().connection_lost(exc)
        if self._waiting is not None:
            self._waiting.cancel()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        answered = self.cycle
        super().on_response_complete()
        if self.cycle is answered:  # no further request has begun
            self._await_request()

    def _await_request(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        self._waiting = self.loop.call_later(HEAD_S, self._close_unless_begun, self.cycle)

    def _close_unless_begun(self, before: RequestResponseCycle) -> None:
        if self.cycle is before:
            self.transport.abort()
