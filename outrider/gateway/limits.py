"""Bounds on what the gateway holds at a time: requests, the bytes of their bodies, and the time that these may take."""

from __future__ import annotations

import asyncio

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.config import GatewayConfig
from outrider.errors import InvalidRequest, Overloaded
from outrider.gateway.errors import refusal
from outrider.gateway.keys import HEALTH

RETRY_S = 1.0  # pause that a refused caller is asked for
_BODY = "outrider.body"  # key in a request's scope: its HeldBody


class RequestLimit:
    """Middleware that refuses requests beyond `max_requests` at a time, health checks excepted."""

    def __init__(self, app: ASGIApp, config: GatewayConfig) -> None:
        self._app = app
        self._max = config.max_requests
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["path"] == HEALTH:
            await self._app(scope, receive, send)
            return
        if self._running >= self._max:
            status, content, headers = refusal(
                Overloaded(f"the gateway serves {self._max} requests already; try again", RETRY_S)
            )
            await JSONResponse(content, status, headers=headers)(scope, receive, send)
            return
        self._running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1


class HeldBytes:
    """The bytes of the bodies of all running requests."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0

    def add(self, size: int) -> None:
        """Add bytes. Raises Overloaded, after having added them, if there are too many."""
        self.held += size
        if self.held > self.most:
            raise Overloaded("the gateway holds as many bytes of requests as it can; try again", RETRY_S)


class HeldBody:
    """The body of one request, as a part of all."""

    def __init__(self, total: HeldBytes) -> None:
        self._total = total
        self.size = 0
        self._copies = 1

    def receive(self, size: int) -> None:
        """Count further bytes. Raises Overloaded."""
        self.size += size
        self._total.add(size)

    def copy(self, copies: int) -> None:
        """Count the whole body so many times. Raises InvalidRequest, or Overloaded."""
        if self.size * copies > self._total.most:
            most = self._total.most // self.size
            raise InvalidRequest("n", f"is {copies}, must be at most {most} for a request of {self.size} bytes")
        more, self._copies = self.size * (copies - self._copies), copies
        self._total.add(more)

    def release(self) -> None:
        """Count the body no longer."""
        self._total.held -= self.size * self._copies


def body_of(request: Request) -> HeldBody:
    """Return the body of a request, which `BodyLimit` counts."""
    held: HeldBody = request.scope[_BODY]
    return held


class BodyLimit:
    """Middleware that limits bodies: each to `max_request_bytes` (status 413), which must arrive within `body_s`
    (status 408), and those of all running requests together to `max_total_bytes` (Overloaded)."""

    def __init__(self, app: ASGIApp, config: GatewayConfig) -> None:
        self._app = app
        self._max_bytes = config.max_request_bytes
        self._body_s = config.body_s
        self._total = HeldBytes(config.max_total_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        announced = dict(scope.get("headers", ())).get(b"content-length", b"")
        expected = int(announced) if announced.isdigit() else 0
        body, complete = HeldBody(self._total), False
        deadline = asyncio.get_running_loop().time() + self._body_s

        async def limited() -> Message:
            nonlocal complete
            if complete:  # what follows is only that the client has gone
                return await receive()
            if expected > self._max_bytes:
                raise self._too_large()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not arrive within {self._body_s:g} s (body_s)") from None
            complete = not message.get("more_body", False)
            body.receive(len(message.get("body", b"")))
            if body.size > self._max_bytes:
                raise self._too_large()
            return message

        try:
            await self._app({**scope, _BODY: body}, limited, send)
        finally:
            body.release()

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the body is larger than {self._max_bytes} bytes")
