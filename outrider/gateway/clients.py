"""The gateway's clients of its router: one for each API key of its callers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.client import AsyncClient
from outrider.config import GatewayConfig
from outrider.errors import ConfigError, Unauthenticated
from outrider.gateway.keys import caller_key

MAX_CLIENTS = 256  # clients that stay open after their requests
_USED = "outrider.used"  # key in a request's scope: the clients that the request uses


@dataclass(slots=True)
class _PooledClient:
    client: AsyncClient
    requests: int = 0  # requests that use the client now


class TenantClients:
    """A pool with a client for each API key. Beyond `MAX_CLIENTS` the least recently used idle client is closed.

    Raises ConfigError for settings with which no caller could use the router.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._pool: OrderedDict[str, _PooledClient] = OrderedDict()  # by key, the most recently used last
        self._connect("a-key")  # raises ConfigError at the start if no key may be sent to this router
        self.keyless = self._connect("")  # for checks of keys

    def client(self, request: Request) -> AsyncClient:
        """Return the client for the caller of a request, until the request is answered.

        The client sends the caller's key to the router, which checks it. Raises Unauthenticated for a malformed key.
        """
        key = caller_key(request.headers)
        if key not in self._pool:
            try:
                self._pool[key] = _PooledClient(self._connect(key))
            except ConfigError as error:
                raise Unauthenticated(str(error)) from None
        self._pool.move_to_end(key)
        pooled = self._pool[key]
        pooled.requests += 1
        request.scope[_USED].append(pooled)
        return pooled.client

    def tracking_requests(self, app: ASGIApp) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        """Return middleware that releases the clients of a request when its answer has ended."""

        async def tracked(scope: Scope, receive: Receive, send: Send) -> None:
            used: list[_PooledClient] = []
            try:
                await app({**scope, _USED: used}, receive, send)
            finally:
                for pooled in used:
                    pooled.requests -= 1
                await self._shrink(MAX_CLIENTS)

        return tracked

    async def close(self) -> None:
        """Close all clients."""
        for pooled in self._pool.values():
            pooled.requests = 0
        await self._shrink(0)
        await self.keyless.close()

    async def _shrink(self, size: int) -> None:
        """Close idle clients, the least recently used first, until at most `size` clients are open."""
        idle = [key for key, pooled in self._pool.items() if not pooled.requests]
        closed = [self._pool.pop(key) for key in idle[: max(0, len(self._pool) - size)]]
        for pooled in closed:
            await pooled.client.close()

    def _connect(self, key: str) -> AsyncClient:
        config = self._config
        return AsyncClient(
            config.router,
            retries=0,  # OpenAI's clients retry by themselves
            api_key=key,
            ca=config.ca,
            tls=config.tls,
            server_name=config.server_name or None,
        )
