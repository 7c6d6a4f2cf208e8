"""The registry of live workers, which announce themselves under heartbeat keys that expire."""

from __future__ import annotations

import asyncio
import json
import logging
import reprlib
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from outrider.errors import InternalError, Unavailable
from outrider.store.client import Client, connect, load_object, redis_errors

TOP = -1  # the tier above all drafters: the verifiers
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
    tier: int = 0  # of a drafter
    above: int = TOP  # the tier that it drafts for
    treeless: bool = False  # whether a verifier cannot verify trees, so that it needs no drafters
    serves: bool = False  # whether a drafter accepts trees from a tier below it
    zone: str = ""  # zone of its machine; "": not known
    draining: bool = False  # it shuts down: no new sessions are placed there
    prefill: float = 0.0  # prompt tokens that a verifier reads per second; 0: not known
    weights: str = ""  # digest of a verifier's weights; "": not known
    trained_for: str = ""  # digest of the target that a drafter was trained for; "": it drafts for any
    draws: bool = True  # whether a drafter can draft for rules that draw from q
    treeless_why: str = ""  # why a verifier is treeless
    prefixes: str = ""  # keys of prefixes whose KV a verifier has; see outrider.core.session.prefix_keys


_KINDS = get_type_hints(Worker) | {"role": str}


@dataclass(frozen=True, slots=True)
class _WorkerEntry:
    """A worker and how long each of its heartbeats counts."""

    worker: Worker
    ttl_s: float


class Registry:
    """The live workers. Eventually consistent: a worker that died is listed until its key expires.

    After an outage of Redis that this object noticed, the workers that it knew before count as alive for one more of
    their TTLs, because they could not renew their keys. All methods raise Unavailable when Redis cannot be reached.
    """

    def __init__(self, redis: Client) -> None:
        self._redis = redis
        self._known: dict[str, _WorkerEntry] = {}  # as last read
        self._unreachable = False  # whether Redis could not be reached at the last read
        self._grace: dict[
            str, float
        ] = {}  # known before the outage, not seen since -> end of the grace period (monotonic)

    async def announce(self, worker: Worker, ttl_s: float) -> None:
        """List the worker for `ttl_s` seconds from now, replacing its earlier entry."""
        with redis_errors(self._redis):
            async with self._redis.pipeline() as pipeline:
                pipeline.set(_WORKER + worker.worker_id, _dump(worker, ttl_s), px=round(ttl_s * 1000))
                pipeline.sadd(_IDS, worker.worker_id)
                await pipeline.execute()

    async def withdraw(self, worker_id: str) -> None:
        """Remove a worker. Succeeds if it is not there."""
        with redis_errors(self._redis):
            async with self._redis.pipeline() as pipeline:
                pipeline.delete(_WORKER + worker_id)
                pipeline.srem(_IDS, worker_id)
                await pipeline.execute()

    async def workers(self, role: Role | None = None) -> list[Worker]:
        """Return the workers of a role, or all, by id. Malformed entries are skipped and logged."""
        try:
            seen = {entry.worker.worker_id: entry for entry in await self._entries()}
        except Unavailable:
            self._unreachable = True
            raise
        now = time.monotonic()
        if self._unreachable:
            self._unreachable = False
            self._grace = {name: now + entry.ttl_s for name, entry in self._known.items()}
        self._grace = {name: end for name, end in self._grace.items() if name not in seen and end > now}
        self._known = {name: self._known[name] for name in self._grace} | seen
        return [entry.worker for _, entry in sorted(self._known.items()) if role in (None, entry.worker.role)]

    async def _entries(self) -> list[_WorkerEntry]:
        with redis_errors(self._redis):
            ids: list[Any] = sorted(await self._redis.smembers(_IDS))  # bytes
            blobs: list[Any] = await self._redis.mget([_WORKER.encode() + name for name in ids]) if ids else []
            # A worker whose key expired adds itself again with its next heartbeat.
            if expired := [name for name, blob in zip(ids, blobs, strict=True) if blob is None]:
                await self._redis.srem(_IDS, *expired)
        return [entry for blob in blobs if blob and (entry := _load(blob))]


async def keep_announced(
    redis_url: str, describe: Callable[[], Worker], interval_s: float, changed: asyncio.Event | None = None
) -> None:
    """Announce `describe()` every `interval_s` seconds, and when `changed` is set, until cancelled; then withdraw it.

    The entry expires after three intervals without a heartbeat. An outage of Redis is logged once; the next heartbeat
    tries again. Raises ConfigError for a malformed URL.
    """
    client = connect(redis_url)
    registry = Registry(client)
    reachable = True
    changed = changed or asyncio.Event()
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
            changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await changed.wait()
    finally:
        await _withdraw(registry, describe().worker_id)
        await client.aclose()


async def _withdraw(registry: Registry, worker_id: str) -> None:
    try:
        await registry.withdraw(worker_id)
    except Unavailable:
        log.info("could not withdraw; the entry expires by itself")


def _dump(worker: Worker, ttl_s: float) -> str:
    return json.dumps(asdict(worker) | {"tokenizer_digest": worker.tokenizer_digest.hex(), "ttl_s": ttl_s})


def _load(blob: bytes) -> _WorkerEntry | None:
    try:
        values = load_object(blob, "a worker's entry")
        # A newer worker may send fields unknown here, an older one fewer.
        known = {field.name: values[field.name] for field in fields(Worker) if field.name in values}
        worker = Worker(**known | {"tokenizer_digest": bytes.fromhex(values["tokenizer_digest"])})
        if worker.role not in get_args(Role):
            raise ValueError(f"{worker.role!r} is no role")
        for name, value in known.items():
            kind = _KINDS[name]
            if name != "tokenizer_digest" and not isinstance(value, (int, float) if kind is float else kind):
                raise TypeError(f"{name} is {reprlib.repr(value)}")
        return _WorkerEntry(worker, float(values["ttl_s"]))
    except (ArithmeticError, InternalError, KeyError, RecursionError, TypeError, ValueError) as error:
        log.warning("skipped a worker's entry: %s", error)
        return None
