"""Who is there: workers announce themselves under heartbeat keys that expire."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from redis.asyncio import Redis

from outrider.errors import InternalError, Unavailable
from outrider.store.client import connect, loads, translated

Role = Literal["verifier", "drafter"]

_IDS = "outrider:{workers}:ids"  # one hash tag for the whole registry, so that MGET works on a Redis Cluster
_WORKER = "outrider:{workers}:id:"
_MISSED_HEARTBEATS = 3

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Worker:
    """One verifier or drafter as it last described itself."""

    worker_id: str  # unique over both roles
    role: Role
    address: str  # "host:port" of its gRPC server
    model: str
    tokenizer_digest: bytes
    vocabulary: int
    context: int  # longest session, in tokens
    slots: int  # sessions at once
    sessions: int  # sessions now
    parameters: int  # of its model


class Registry:
    """The workers that are alive. Eventually consistent: a worker that died is listed until its key expires.

    All methods raise Unavailable when Redis cannot be reached.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def announce(self, worker: Worker, ttl_s: float) -> None:
        """Lists the worker for `ttl_s` seconds from now, replacing what it said before."""
        with translated(self._redis):
            async with self._redis.pipeline() as pipeline:
                pipeline.set(_WORKER + worker.worker_id, _dump(worker), px=round(ttl_s * 1000))
                pipeline.sadd(_IDS, worker.worker_id)
                await pipeline.execute()

    async def withdraw(self, worker_id: str) -> None:
        """Takes a worker off the list. Succeeds if it is not there."""
        with translated(self._redis):
            async with self._redis.pipeline() as pipeline:
                pipeline.delete(_WORKER + worker_id)
                pipeline.srem(_IDS, worker_id)
                await pipeline.execute()

    async def workers(self, role: Role | None = None) -> list[Worker]:
        """The workers of a role, or all, by id. Entries that are not workers are skipped and logged."""
        with translated(self._redis):
            ids: list[Any] = sorted(await self._redis.smembers(_IDS))  # bytes
            blobs: list[Any] = await self._redis.mget([_WORKER.encode() + name for name in ids]) if ids else []
            # A worker whose key expired puts itself back with its next heartbeat.
            if gone := [name for name, blob in zip(ids, blobs, strict=True) if blob is None]:
                await self._redis.srem(_IDS, *gone)
        return [worker for blob in blobs if blob and (worker := _load(blob)) and role in (None, worker.role)]


async def keep_announced(redis_url: str, describe: Callable[[], Worker], interval_s: float) -> None:
    """Announces `describe()` every `interval_s` seconds until cancelled, then withdraws it.

    The entry expires after three intervals without a heartbeat. A Redis that cannot be reached is logged once
    an outage and tried again with the next heartbeat. Raises ConfigError when the URL is malformed.
    """
    client = connect(redis_url)
    registry = Registry(client)
    reachable = True
    try:
        while True:
            try:
                await registry.announce(describe(), _MISSED_HEARTBEATS * interval_s)
                if not reachable:
                    log.info("announced again")
                reachable = True
            except Unavailable as error:
                if reachable:
                    log.warning("not announced to routers: %s", error)
                reachable = False
            await asyncio.sleep(interval_s)
    finally:
        await _leave(registry, describe().worker_id)
        await client.aclose()


async def _leave(registry: Registry, worker_id: str) -> None:
    try:
        await registry.withdraw(worker_id)
    except Unavailable:
        log.info("could not withdraw; the entry expires by itself")


def _dump(worker: Worker) -> str:
    return json.dumps(asdict(worker) | {"tokenizer_digest": worker.tokenizer_digest.hex()})


def _load(blob: bytes) -> Worker | None:
    try:
        values = loads(blob, "a worker's entry")
        # A newer worker may say more than we know.
        known = {field.name: values[field.name] for field in fields(Worker)}
        return Worker(**known | {"tokenizer_digest": bytes.fromhex(values["tokenizer_digest"])})
    except (InternalError, KeyError, TypeError, ValueError) as error:
        log.warning("skipped a worker's entry: %s", error)
        return None
