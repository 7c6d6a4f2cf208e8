"""Judges callers' API keys before anything of their requests is read."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.client import AsyncClient
from outrider.errors import OutriderError, Overloaded, Unauthenticated
from outrider.gateway.errors import response
from outrider.limits.slow_refusals import SlowRefusals

HEALTH = "/health"  # the only path that needs no key
TENANT = "outrider.tenant"  # key in a request's scope: the tenant of its key; empty where the router needs no keys
VERDICT_S = 2.0  # how long a verdict of the router is used again
CHECK_S = 2.0  # timeout of the router's verdict
MAX_VERDICTS = 4096  # of each kind
MAX_CHECKS = 64  # keys that were never accepted and are checked at the same time

_Digest = bytes


def caller_key(headers: Headers) -> str:
    """Return the API key of a request, as OpenAI's clients or as Anthropic's send it; empty without one."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


def address_of(scope: Scope) -> str:
    """Return the address from which a request came; empty if it is not known."""
    host, _ = scope.get("client") or ("", 0)
    return str(host)


class KeyCheck:
    """Checks keys by calls to the router, which names their tenants.

    The router is called once in `VERDICT_S` for each key, over one connection for all keys. Verdicts are kept by the
    keys' digests. Unknown keys cannot displace accepted ones, and take no more than `MAX_CHECKS` calls at a time.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._accepted = _Verdicts()  # with the tenants
        self._refused = _Verdicts()  # with the reasons
        self._checks: dict[_Digest, asyncio.Task[str | OutriderError]] = {}
        self._refusals = SlowRefusals()  # by address

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Return middleware that passes on the requests whose key the router accepts, and reads nothing of others."""

        async def checked(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["path"] != HEALTH:
                try:
                    scope = {**scope, TENANT: await self.check(caller_key(Headers(scope=scope)))}
                except OutriderError as error:
                    await self._refusals.hold(address_of(scope))
                    await response(error, scope)(scope, receive, send)
                    return
            await app(scope, receive, send)

        return checked

    async def check(self, key: str) -> str:
        """Return the tenant of a key that the router accepts. Raises Unauthenticated for another key, Unavailable if
        the router does not answer, and Overloaded if too many other keys are checked now."""
        digest = hashlib.sha256(key.encode()).digest()
        if (tenant := self._accepted.valid(digest)) is not None:
            return tenant
        if (reason := self._refused.valid(digest)) is not None:
            raise Unauthenticated(reason)
        if digest not in self._checks:
            if digest not in self._accepted and len(self._checks) >= MAX_CHECKS:
                raise Overloaded("the gateway checks as many new keys as it can; try again", retry_after=1.0)
            self._checks[digest] = asyncio.create_task(self._ask(key, digest))
        answer = await asyncio.shield(self._checks[digest])
        if isinstance(answer, OutriderError):
            raise answer
        return answer

    async def close(self) -> None:
        """End the checks that run."""
        for task in self._checks.values():
            task.cancel()
        await asyncio.gather(*self._checks.values(), return_exceptions=True)

    async def _ask(self, key: str, digest: _Digest) -> str | OutriderError:
        """Return the tenant of a key, or the router's error for it, and remember the router's verdict."""
        try:
            tenant = await self._client.check_key(key, timeout=CHECK_S)
        except Unauthenticated as error:
            self._accepted.pop(digest, None)
            self._refused.remember(digest, str(error))
            return error
        except OutriderError as error:
            return error
        finally:
            del self._checks[digest]
        self._refused.pop(digest, None)
        self._accepted.remember(digest, tenant)
        return tenant


class _Verdicts(OrderedDict[_Digest, tuple[float, str]]):
    """Verdicts of one kind: the end of each, and its tenant or reason; the oldest first."""

    def valid(self, digest: _Digest) -> str | None:
        """Return a verdict that has not ended."""
        until, verdict = self.get(digest, (0.0, ""))
        return verdict if until > time.monotonic() else None

    def remember(self, digest: _Digest, verdict: str) -> None:
        """Add a verdict, instead of the oldest one if there are too many."""
        self[digest] = time.monotonic() + VERDICT_S, verdict
        self.move_to_end(digest)
        if len(self) > MAX_VERDICTS:
            self.popitem(last=False)
