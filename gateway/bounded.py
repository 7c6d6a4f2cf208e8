"""Bodies that are too large are refused before they are in memory."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Bounded:
    """An application whose requests have bodies of at most `most` bytes; reading a larger one raises status 413."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        announced = dict(scope.get("headers", ())).get(b"content-length", b"")
        expected = int(announced) if announced.isdigit() else 0
        got = 0

        async def counted() -> Message:
            nonlocal got
            message: Message = {} if expected > self._most else await receive()
            got += len(message.get("body", b""))
            if max(expected, got) > self._most:
                raise HTTPException(413, f"the body is larger than {self._most} bytes")
            return message

        await self._app(scope, counted, send)
