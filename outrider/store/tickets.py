"""The key with which routers sign drafters' tickets and upstreams check them: one for the whole cluster."""

from __future__ import annotations

import secrets
from typing import Any

from outrider.errors import InternalError
from outrider.store.client import Client, redis_errors

TICKET_KEY_BYTES = 32

_KEY = "outrider:{cluster}:ticket-key"


async def ticket_key(redis: Client) -> bytes:
    """Return the cluster's ticket key: 32 random bytes, made by the first caller and the same for all.

    A Redis that lost everything makes another key, so a process that keeps the key reads it again when a ticket does
    not fit. Raises Unavailable when Redis cannot be used.
    """
    with redis_errors(redis):
        await redis.set(_KEY, secrets.token_bytes(TICKET_KEY_BYTES), nx=True)
        key: Any = await redis.get(_KEY)
    if not isinstance(key, bytes) or len(key) != TICKET_KEY_BYTES:
        raise InternalError(f"{_KEY} in Redis is not what Outrider writes there; is the database shared?")
    return key
