"""What earlier responses of a gateway's Responses API had in them, for requests that continue them.

    outrider:responses:H   the items of a conversation up to the end of a response (JSON)

H is a digest of the tenant and the response's id, so a response is found by its own tenant alone. What is kept counts
as a session of its tenant and expires as one.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from outrider.errors import InvalidRequest, NotFound
from outrider.store.redis.client import Client, redis_errors
from outrider.store.tenant_storage import TenantStorage

MOST_BYTES = 2**20  # of one conversation
MOST_CHARACTERS = 128  # of an id
OVERHEAD_BYTES = 512  # of Redis, for each


class KeptResponses:
    """All responses that are kept, each for `ttl_s` seconds. Methods raise Unavailable when Redis cannot be used."""

    def __init__(self, redis: Client, ttl_s: float, storage: TenantStorage) -> None:
        """`storage` counts what is kept."""
        self._redis = redis
        self._ttl_ms = round(ttl_s * 1000)
        self._storage = storage

    async def keep(self, tenant: str, response_id: str, items: bytes) -> None:
        """Store a tenant's conversation under a response's id. Raises InvalidRequest for one that is too long, and
        Overloaded where the tenant keeps too much."""
        if len(items) > MOST_BYTES:
            raise InvalidRequest("items", f"have {len(items)} bytes, must have at most {MOST_BYTES}")
        name = _response_name(tenant, response_id)
        await self._storage.reserve(tenant, f"response/{name}", 0, OVERHEAD_BYTES + len(items), new=True)
        with redis_errors(self._redis):
            await self._redis.set(_key(name), items, px=self._ttl_ms)

    async def find(self, tenant: str, response_id: str) -> bytes:
        """Return what `keep` stored. Raises NotFound for an unknown, an expired and another tenant's response."""
        with redis_errors(self._redis):
            items: Any = await self._redis.get(_key(_response_name(tenant, response_id)))
        if items is None:
            raise NotFound(f"response {response_id!r} is not known; it may have expired (session_ttl_s)")
        return bytes(items)


def _response_name(tenant: str, response_id: str) -> str:
    if not 1 <= len(response_id) <= MOST_CHARACTERS:
        raise InvalidRequest("id", f"must have 1 to {MOST_CHARACTERS} characters")
    return hashlib.sha256(json.dumps([tenant, response_id]).encode()).hexdigest()[:40]


def _key(name: str) -> str:
    return f"outrider:responses:{name}"
