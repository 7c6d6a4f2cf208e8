"""Judges callers' API keys before anything of their requests is read."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.client import AsyncClient
from outrider.errors import OutriderError, Overloaded, Unauthenticated
from outrider.gateway.errors import refusal

HEALTH = "/health"  # the only path that needs no key
VERDICT_S = 2.0  # how long a verdict of the router is used again
CHECK_S = 2.0  # timeout of the router's verdict
MAX_VERDICTS = 4096  # of each kind
MAX_CHECKS = 64  # keys that were never accepted and are checked at the same time

_Digest = bytes


def caller_key(headers: Headers) -> str:
    """Return the API key of a request; empty without one."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


class KeyCheck:
    """Checks keys by calls to the router.

    The router is called once in `VERDICT_S` for each key, over one connection for all keys. Verdicts are kept by the
    keys' digests. Unknown keys cannot displace accepted ones, and take no more than `MAX_CHECKS` calls at a time.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._accepted: OrderedDict[_Digest, float] = OrderedDict()  # the end of the verdict; the oldest first
        self._refused: OrderedDict[_Digest, tuple[float, str]] = OrderedDict()  # and the reason
        self._checks: dict[_Digest, asyncio.Task[OutriderError | None]] = {}

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Return middleware that passes on the requests whose key the router accepts, and reads nothing of others."""

        async def checked(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["path"] != HEALTH:
                try:
                    await self.check(caller_key(Headers(scope=scope)))
                except OutriderError as error:
                    status, content, headers = refusal(error)
                    await JSONResponse(content, status, headers=headers)(scope, receive, send)
                    return
            await app(scope, receive, send)

        return checked

    async def check(self, key: str) -> None:
        """Return if the router accepts the key. Raises Unauthenticated if not, Unavailable if it does not answer, and
        Overloaded if too many other keys are checked now."""
        digest = hashlib.sha256(key.encode()).digest()
        if self._accepted.get(digest, 0.0) > time.monotonic():
            return
        until, reason = self._refused.get(digest, (0.0, ""))
        if until > time.monotonic():
            raise Unauthenticated(reason)
        if digest not in self._checks:
            if digest not in self._accepted and len(self._checks) >= MAX_CHECKS:
                raise Overloaded("the gateway checks as many new keys as it can; try again", retry_after=1.0)
            self._checks[digest] = asyncio.create_task(self._ask(key, digest))
        error = await asyncio.shield(self._checks[digest])
        if error is not None:
            raise error

    async def close(self) -> None:
        """End the checks that run."""
        for task in self._checks.values():
            task.cancel()
        await asyncio.gather(*self._checks.values(), return_exceptions=True)

    async def _ask(self, key: str, digest: _Digest) -> OutriderError | None:
        """Return the router's error for a key, and remember its verdict; None if the router accepts the key."""
        try:
            await self._client.check_key(key, timeout=CHECK_S)
        except Unauthenticated as error:
            self._accepted.pop(digest, None)
            self._refused[digest] = time.monotonic() + VERDICT_S, str(error)
            _shrink(self._refused)
            return error
        except OutriderError as error:
            return error
        finally:
            del self._checks[digest]
        self._refused.pop(digest, None)
        self._accepted[digest] = time.monotonic() + VERDICT_S
        self._accepted.move_to_end(digest)
        _shrink(self._accepted)
        return None


def _shrink(verdicts: OrderedDict[_Digest, float] | OrderedDict[_Digest, tuple[float, str]]) -> None:
    if len(verdicts) > MAX_VERDICTS:
        verdicts.popitem(last=False)
