"""Whose drafters may read a tenant's texts.

outrider:{keys}:readers   hash: tenant -> "own", "cluster" or "any"; tenants that have said nothing have no entry
"""

from __future__ import annotations

import time
from typing import Literal, get_args

from outrider.errors import Unavailable
from outrider.store.names import check_name
from outrider.store.redis.client import Client, redis_errors

# own: those that the tenant's keys have let in; cluster: also the cluster's own; any: those of other tenants, too.
Readers = Literal["own", "cluster", "any"]
DEFAULT: Readers = "cluster"
CACHE_S = 5.0
MAX_CACHED = 4096

_READERS = "outrider:{keys}:readers"


class TextReaders:
    """What tenants have said, as it was at most `CACHE_S` ago."""

    def __init__(self, redis: Client) -> None:
        self._redis = redis
        self._known: dict[str, tuple[Readers, float]] = {}  # by tenant: what it said, and until when that counts

    async def of(self, tenant: str) -> Readers:
        """Return whose drafters may read a tenant's texts: while Redis is away what is known, or its own alone."""
        readers, until = self._known.get(tenant, ("own", 0.0))
        if until > time.monotonic():
            return readers
        try:
            with redis_errors(self._redis):
                said = await self._redis.hget(_READERS, tenant)
        except Unavailable:
            return readers
        readers = next((it for it in get_args(Readers) if said == it.encode()), DEFAULT)
        if len(self._known) >= MAX_CACHED:
            self._known.clear()
        self._known[tenant] = readers, time.monotonic() + CACHE_S
        return readers

    async def set(self, tenant: str, readers: Readers) -> None:
        """Keep what a tenant says. Routers follow within `CACHE_S`. Raises InvalidRequest for an invalid name."""
        check_name("tenant", tenant)
        with redis_errors(self._redis):
            await self._redis.hset(_READERS, tenant, readers)
