"""Whoever calls the gateway, and the client of the router that speaks for him."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.client import AsyncClient
from outrider.config import GatewayConfig
from outrider.errors import ConfigError, Unauthenticated

MOST = 256  # clients that are kept for callers who may come back
_USED = "outrider.used"  # in a request's scope: the clients that it was given


@dataclass(slots=True)
class _Kept:
    client: AsyncClient
    requests: int = 0  # that use it now


class Callers:
    """A client for each API key. Of more than `MOST`, the one that was used longest ago and serves nobody is closed.

    Raises ConfigError when no caller could have one.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # by key, the latest used last
        self._connect("a-key")  # a router that no key may go to is a mistake to hear of at the start

    def client(self, request: Request) -> AsyncClient:
        """For whoever sent this, until it is answered: his key goes on to the router, which judges it.

        Raises Unauthenticated for a key that cannot be one.
        """
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        if key not in self._kept:
            try:
                self._kept[key] = _Kept(self._connect(key))
            except ConfigError as error:
                raise Unauthenticated(str(error)) from None
        self._kept.move_to_end(key)
        kept = self._kept[key]
        kept.requests += 1
        request.scope[_USED].append(kept)
        return kept.client

    def lending(self, app: ASGIApp) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        """The application, whose requests give back what `client` gave them when their answers have ended."""

        async def lent(scope: Scope, receive: Receive, send: Send) -> None:
            used: list[_Kept] = []
            try:
                await app({**scope, _USED: used}, receive, send)
            finally:
                for kept in used:
                    kept.requests -= 1
                await self._close(MOST)

        return lent

    async def close(self) -> None:
        """All of them."""
        for kept in self._kept.values():
            kept.requests = 0
        await self._close(0)

    async def _close(self, most: int) -> None:
        idle = [key for key, kept in self._kept.items() if not kept.requests]
        closed = [self._kept.pop(key) for key in idle[: max(0, len(self._kept) - most)]]
        for kept in closed:
            await kept.client.close()

    def _connect(self, key: str) -> AsyncClient:
        config = self._config
        return AsyncClient(
            config.router,
            retries=0,  # OpenAI's clients come back by themselves
            api_key=key,
            ca=config.ca,
            tls=config.tls,
            server_name=config.server_name or None,
        )
