"""Bounds on what the gateway holds at a time: requests, the bytes of their bodies, and the time that these may take."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.config import GatewayConfig
from outrider.core.concurrency_limit import ConcurrencyLimit
from outrider.errors import InvalidRequest, Overloaded
from outrider.gateway.errors import response
from outrider.gateway.keys import HEALTH, TENANT

RETRY_S = 1.0  # pause that a refused caller is asked for
_BODY = "outrider.body"  # key in a request's scope: its HeldBody


class RequestLimit:
    """Middleware that refuses requests beyond `max_requests` at a time, health checks excepted."""

    def __init__(self, app: ASGIApp, config: GatewayConfig) -> None:
        self._app = app
        problem = f"the gateway serves {config.max_requests} requests already; try again"
        self._running = ConcurrencyLimit(problem, config.max_requests, retry_s=RETRY_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["path"] == HEALTH:
            await self._app(scope, receive, send)
            return
        with ExitStack() as running:
            try:
                running.enter_context(self._running.hold())
            except Overloaded as error:
                await response(error)(scope, receive, send)
                return
            await self._app(scope, receive, send)


class HeldBytes:
    """The bytes of the bodies of all running requests: at most `most`, and of one tenant no more than are left free.

    So a tenant alone may hold half of them, and there is always room for the next one. Where the router needs no keys
    all callers are one tenant, without a name, which may hold all.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._of_tenant: Counter[str] = Counter()

    @property
    def held(self) -> int:
        """The bytes of all tenants."""
        return self._of_tenant.total()

    def most_of(self, tenant: str) -> int:
        """Return the most that a tenant may hold while no other one holds any."""
        return self._most // 2 if tenant else self._most

    def add(self, tenant: str, size: int) -> None:
        """Add bytes of a tenant. Raises Overloaded, and adds nothing, if there are too many."""
        free = self._most - self.held - size
        if free < 0:
            raise Overloaded("the gateway holds as many bytes of requests as it can; try again", RETRY_S)
        if tenant and self._of_tenant[tenant] + size > free:
            raise Overloaded(
                "this tenant's requests hold as many bytes as the gateway has left for others; try again when one of "
                "them has ended",
                RETRY_S,
            )
        self._of_tenant[tenant] += size

    def release(self, tenant: str, size: int) -> None:
        """Count bytes of a tenant no longer."""
        self._of_tenant[tenant] -= size
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]


class HeldBody:
    """The body of one request, as a part of all."""

    def __init__(self, total: HeldBytes, tenant: str) -> None:
        self._total = total
        self._tenant = tenant
        self._most = total.most_of(tenant)
        self.size = 0
        self._copies = 1

    def receive(self, size: int) -> None:
        """Count further bytes. Raises Overloaded."""
        self._total.add(self._tenant, size)
        self.size += size

    def copy(self, copies: int) -> None:
        """Count the whole body so many times. Raises InvalidRequest, or Overloaded."""
        if self.size * copies > self._most:
            most = self._most // self.size
            raise InvalidRequest("n", f"is {copies}, must be at most {most} for a request of {self.size} bytes")
        self._total.add(self._tenant, self.size * (copies - self._copies))
        self._copies = copies

    def release(self) -> None:
        """Count the body no longer."""
        self._total.release(self._tenant, self.size * self._copies)


def body_of(request: Request) -> HeldBody:
    """Return the body of a request, which `BodyLimit` counts."""
    held: HeldBody = request.scope[_BODY]
    return held


class BodyLimit:
    """Middleware that limits bodies: each to `max_request_bytes` and to what its tenant may hold (status 413), which
    must arrive within `body_s` (status 408), and those of all requests to `max_total_bytes` (Overloaded)."""

    def __init__(self, app: ASGIApp, config: GatewayConfig) -> None:
        self._app = app
        self._max_bytes = config.max_request_bytes
        self._body_s = config.body_s
        self._total = HeldBytes(config.max_total_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        announced = dict(scope.get("headers", ())).get(b"content-length", b"")
        expected = int(announced) if announced.isdigit() else 0
        tenant = scope.get(TENANT, "")
        most = min(self._max_bytes, self._total.most_of(tenant))
        body, complete = HeldBody(self._total, tenant), False
        deadline = asyncio.get_running_loop().time() + self._body_s

        async def limited() -> Message:
            nonlocal complete
            if complete:  # what follows is only that the client has gone
                return await receive()
            if expected > most:
                raise _too_large(most)
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not arrive within {self._body_s:g} s (body_s)") from None
            complete = not message.get("more_body", False)
            size = len(message.get("body", b""))
            if body.size + size > most:
                raise _too_large(most)
            body.receive(size)
            return message

        try:
            await self._app({**scope, _BODY: body}, limited, send)
        finally:
            body.release()


def _too_large(most: int) -> HTTPException:
    return HTTPException(413, f"the body is larger than {most} bytes")
