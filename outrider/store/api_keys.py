"""API keys. Only their hashes are stored.

    outrider:{keys}           hash: SHA-256 of a key, in hexadecimal -> its description (JSON)
    outrider:{keys}:readers   hash: tenant -> whose drafters may read its texts; those that have said nothing have none

A key is 256 random bits, so it cannot be guessed and a plain SHA-256 of it is enough: slow, salted hashes are for
passwords that people choose. A key is looked up by its hash, so the time of a look-up depends on nothing that a caller
could steer towards an existing key.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from outrider.errors import InvalidRequest, NotFound, Unauthenticated, Unavailable
from outrider.limits.concurrency_limit import ConcurrencyLimit
from outrider.store.names import check_name
from outrider.store.redis.client import Client, decoding, load_object, redis_errors
from outrider.store.redis.redis_clock import RedisClock

PREFIX = "outrider_"  # lets scanners for secrets recognize a key
KEY_BYTES = 32
CACHE_S = 2.0  # a revoked key works for at most this time
MAX_CACHED = 4096
MAX_LOOKUPS = 256  # of unknown keys at the same time
ID_CHARACTERS = 12

KeyRole = Literal["caller", "drafter"]

# Drafters that may read a tenant's texts. own: those with its keys; cluster: also the cluster's own; any: all.
Readers = Literal["own", "cluster", "any"]
DEFAULT_READERS: Readers = "cluster"
READERS_S = 5.0  # how long a router remembers what a tenant has said

_KEYS = "outrider:{keys}"
_READERS = "outrider:{keys}:readers"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The stored description of a key."""

    key_id: str  # the first characters of its hash
    tenant: str
    name: str
    created: float  # seconds since 1970, by Redis' clock, as all times here
    expires: float | None  # None: does not expire
    role: KeyRole = "caller"  # what it opens: a router's calls, or its gate for drafters
    models: tuple[str, ...] = ()  # targets that a drafter with it drafts for; empty: all
    sessions: int | None = None  # most sessions at once of each drafter with it; None: as many as it can

    def expired(self, now: float) -> bool:
        """Return whether the key has expired."""
        return self.expires is not None and self.expires <= now


class Keys:
    """All API keys. Methods raise Unavailable when Redis cannot be used."""

    def __init__(self, redis: Client, clock: RedisClock | None = None) -> None:
        """`clock`: which somebody else reads; None: one that `add` and `listed` read."""
        self.clock = clock or RedisClock()
        self._redis = redis
        self._known: dict[str, tuple[ApiKey, float]] = {}  # by hash: the key, and the end of its cache entry
        self._lookups = ConcurrencyLimit("too many unknown keys are looked up now; try again", MAX_LOOKUPS)

    async def add(
        self,
        tenant: str,
        name: str = "",
        *,
        valid_s: float | None = None,
        role: KeyRole = "caller",
        models: Sequence[str] = (),
        sessions: int | None = None,
    ) -> tuple[str, ApiKey]:
        """Create a key for a tenant. Return the secret, which cannot be recovered later, and the stored description.

        Raises InvalidRequest for an invalid tenant name.
        """
        check_name("tenant", tenant)
        if valid_s is not None and not valid_s > 0:
            raise InvalidRequest("expires", "must lie in the future")
        if role == "caller" and (models or sessions is not None):
            raise InvalidRequest("role", "is caller, and models and sessions are of a drafter's key")
        await self.clock.read(self._redis)
        secret, now = PREFIX + secrets.token_urlsafe(KEY_BYTES), self.clock.now()
        digest = secret_digest(secret)
        until = None if valid_s is None else now + valid_s
        key = ApiKey(digest[:ID_CHARACTERS], tenant, name, now, until, role, (*models,), sessions)
        with redis_errors(self._redis):
            await self._redis.hset(_KEYS, digest, json.dumps(asdict(key)))
        return secret, key

    async def listed(self) -> list[ApiKey]:
        """Return all keys, expired ones too, by tenant and age."""
        await self.clock.read(self._redis)
        return sorted((key for _, key in await self._all()), key=lambda key: (key.tenant, key.created))

    async def revoke(self, key_id: str) -> ApiKey:
        """Delete a key; routers refuse it within `CACHE_S`. Raises NotFound."""
        for digest, key in await self._all():
            if key.key_id == key_id:
                with redis_errors(self._redis):
                    await self._redis.hdel(_KEYS, digest)
                return key
        raise NotFound(f"there is no key {key_id!r}; `outrider keys list` shows those that there are")

    async def find(self, secret: str) -> ApiKey:
        """Return the key with this secret, as it was at most `CACHE_S` ago. Raises Unauthenticated, and Overloaded for
        an unknown key while too many others are looked up."""
        digest = secret_digest(secret)
        key, until = self._known.get(digest, (None, 0.0))
        if key is None or until < time.monotonic():
            with nullcontext() if key is not None else self._lookups.hold(), redis_errors(self._redis):
                blob: Any = await self._redis.hget(_KEYS, digest)
            key = None if blob is None else load_key(blob)
            self._remember(digest, key)
        if key is None or key.expired(self.clock.now()):
            raise Unauthenticated("this API key is unknown, expired or revoked; `outrider keys add` makes another one")
        return key

    async def _all(self) -> list[tuple[str, ApiKey]]:
        with redis_errors(self._redis):
            entries: Any = await self._redis.hgetall(_KEYS)
        return [(digest.decode(), load_key(blob)) for digest, blob in entries.items()]

    def _remember(self, digest: str, key: ApiKey | None) -> None:
        """Cache existing keys only: callers could make up any number of unknown ones."""
        self._known.pop(digest, None)
        if key is not None:
            self._known[digest] = key, time.monotonic() + CACHE_S
            if len(self._known) > MAX_CACHED:
                del self._known[next(iter(self._known))]


class TextReaders:
    """What tenants have said, as it was at most `READERS_S` ago."""

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
        readers = next((it for it in get_args(Readers) if said == it.encode()), DEFAULT_READERS)
        if len(self._known) >= MAX_CACHED:
            self._known.clear()
        self._known[tenant] = readers, time.monotonic() + READERS_S
        return readers

    async def set(self, tenant: str, readers: Readers) -> None:
        """Keep what a tenant says. Routers follow within `READERS_S`. Raises InvalidRequest for an invalid name."""
        check_name("tenant", tenant)
        with redis_errors(self._redis):
            await self._redis.hset(_READERS, tenant, readers)


def secret_digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def load_key(blob: bytes) -> ApiKey:
    values = load_object(blob, what := "an API key's entry")
    with decoding(what):
        expires = values["expires"]
        return ApiKey(
            str(values["key_id"]),
            str(values["tenant"]),
            str(values["name"]),
            float(values["created"]),
            None if expires is None else float(expires),
            "drafter" if values.get("role") == "drafter" else "caller",  # an older version has none
            tuple(map(str, values.get("models", ()))),
            None if (sessions := values.get("sessions")) is None else int(sessions),
        )
