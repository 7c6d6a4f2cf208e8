"""Authentication of callers: an API key names a tenant."""

from __future__ import annotations

from typing import Any, Protocol

import grpc.aio

from outrider.errors import Unauthenticated
from outrider.store.keys import Keys

_SCHEME = "bearer "  # in lower case; RFC 7235 makes schemes case-insensitive


class Authenticator(Protocol):
    """Maps a call to its tenant."""

    async def tenant(self, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        """Return the caller's tenant. Raises Unauthenticated if the caller may not call at all, Unavailable without
        Redis."""


class NoAuthentication:
    """Every caller is allowed, and all are one tenant."""

    async def tenant(self, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        return ""


class ApiKeyAuthenticator:
    """A caller with an API key is allowed, for the key's tenant."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def tenant(self, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        credentials = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
        if (
            len(credentials) != 1
            or not isinstance(credentials[0], str)
            or not credentials[0].lower().startswith(_SCHEME)
        ):
            raise Unauthenticated(
                "an API key is needed: set OUTRIDER_API_KEY, or send the metadata `authorization: Bearer KEY`; "
                "`outrider keys add` makes one"
            )
        return (await self._keys.find(credentials[0][len(_SCHEME) :])).tenant
