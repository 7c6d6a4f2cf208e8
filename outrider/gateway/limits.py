"""Bounds on what the gateway holds at a time: requests, the bytes of their bodies, and the time that these may take."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.config import GatewayConfig
from outrider.errors import InvalidRequest, Overloaded
from outrider.gateway.errors import response
from outrider.gateway.keys import HEALTH, TENANT, address_of
from outrider.limits.concurrency_limit import ConcurrencyLimit
from outrider.limits.slow_refusals import SlowRefusals
from outrider.limits.tenant_shares import RETRY_S, TenantShares

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
                await response(error, scope)(scope, receive, send)
                return
            await self._app(scope, receive, send)


class TenantRequestLimit:
    """Middleware that refuses requests of a tenant beyond its share of `max_requests`. It needs the key's tenant."""

    def __init__(self, app: ASGIApp, config: GatewayConfig) -> None:
        self._app = app
        self._running = TenantShares(config.max_requests, "requests", least=1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if TENANT not in scope:  # it has no key, and needs none
            await self._app(scope, receive, send)
            return
        tenant = scope[TENANT]
        try:
            self._running.add(tenant, 1)
        except Overloaded as error:
            await response(error, scope)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._running.release(tenant, 1)


class TenantRefusals:
    """Middleware that holds refusals (status 4xx) of a tenant that gets many. It needs the key's tenant."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._refusals = SlowRefusals()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""

        async def held(message: Message) -> None:
            if message["type"] == "http.response.start" and 400 <= message["status"] < 500:
                await self._refusals.hold(scope[TENANT] or address_of(scope))
            await send(message)

        await self._app(scope, receive, held if TENANT in scope else send)


class HeldBody:
    """The body of one request, as a part of all."""

    def __init__(self, total: TenantShares, tenant: str) -> None:
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
        """Charge the body's size `copies` times (n > 1). Raises InvalidRequest, or Overloaded."""
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
        self._total = TenantShares(config.max_total_bytes, "bytes")

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
