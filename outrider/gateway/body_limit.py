"""Refuses request bodies that are too large before they are in memory."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """Middleware that limits request bodies to `max_bytes`; reading a larger body raises status 413."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        announced = dict(scope.get("headers", ())).get(b"content-length", b"")
        expected = int(announced) if announced.isdigit() else 0
        received = 0

        async def counted() -> Message:
            nonlocal received
            message: Message = {} if expected > self._max_bytes else await receive()
            received += len(message.get("body", b""))
            if max(expected, received) > self._max_bytes:
                raise HTTPException(413, f"the body is larger than {self._max_bytes} bytes")
            return message

        await self._app(scope, counted, send)
