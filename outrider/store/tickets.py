"""The public keys of routers, with which upstreams check drafters' tickets.

    outrider:{tickets}:keys   sorted set: an Ed25519 public key -> until when it counts, in milliseconds since 1970

Each router lists a key of its own and renews it while it runs. The times are by Redis' clock, as those in the tickets
are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.store.redis.client import Client, redis_errors

RENEW_S = 5.0  # between two renewals by a router, which also restore a key that Redis has lost
KEY_LIFE_S = 150.0  # how long a key counts after its last renewal; a ticket is valid for less
MAX_KEYS = 1024  # keys that are read, those that count longest

_KEYS = "outrider:{tickets}:keys"


async def list_key(redis: Client, public_key: bytes, now: float) -> None:
    """List a router's key for KEY_LIFE_S from `now`, Redis' time, and remove keys that ended long ago. Raises
    Unavailable when Redis cannot be used."""
    with redis_errors(redis):
        async with redis.pipeline() as pipeline:
            pipeline.zadd(_KEYS, {public_key: round((now + KEY_LIFE_S) * 1000)})
            pipeline.zremrangebyscore(_KEYS, "-inf", round((now - KEY_LIFE_S) * 1000))
            pipeline.expire(_KEYS, round(2 * KEY_LIFE_S))
            await pipeline.execute()


async def listed_keys(redis: Client, now: Callable[[], float]) -> dict[bytes, float]:
    """Return the listed keys and until when each counts, in seconds since 1970: KEY_LIFE_S from now at most, whatever a
    router wrote. `now` returns Redis' time. Raises Unavailable when Redis cannot be used."""
    with redis_errors(redis):
        found: Any = await redis.zrevrange(_KEYS, 0, MAX_KEYS - 1, withscores=True)
    latest = now() + KEY_LIFE_S
    return {key: min(until_ms / 1000, latest) for key, until_ms in found}
