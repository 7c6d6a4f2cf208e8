"""Who calls: an API key names a tenant."""

from __future__ import annotations

from typing import Any, Protocol

import grpc.aio

from outrider.errors import Unauthenticated
from outrider.store.keys import Keys

_SCHEME = "bearer "  # in lower case: RFC 7235 has schemes in any


class Callers(Protocol):
    """Tells tenants by their calls."""

    async def tenant(self, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        """The caller's tenant. Raises Unauthenticated when he may not call at all, Unavailable without Redis."""


class Anybody:
    """Everybody may call, and is one tenant."""

    async def tenant(self, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        return ""


class Keyholders:
    """Whoever has a key may call, for the key's tenant."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def tenant(self, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        given = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
        if len(given) != 1 or not isinstance(given[0], str) or not given[0].lower().startswith(_SCHEME):
            raise Unauthenticated(
                "an API key is needed: set OUTRIDER_API_KEY, or send the metadata `authorization: Bearer KEY`; "
                "`outrider keys add` makes one"
            )
        return (await self._keys.find(given[0][len(_SCHEME) :])).tenant
