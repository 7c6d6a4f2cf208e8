"""Who is there: workers announce themselves under heartbeat keys that expire."""

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
from outrider.store.client import Client, connect, loads, translated

TOP = -1  # above all tiers: the verifiers
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
    treeless: bool = False  # whether a verifier's model can verify no trees, so that drafting for it is of no use
    serves: bool = False  # whether a drafter takes trees from a tier below it
    zone: str = ""  # where it is; "": not said
    draining: bool = False  # it is going down: nothing new is to be placed there
    prefill: float = 0.0  # tokens of a prompt that a verifier reads in a second; 0: not known
    weights: str = ""  # digest of a verifier's model; "": not known
    trained_for: str = ""  # digest of the model that a drafter was trained to draft for; "": it drafts for any
    draws: bool = True  # whether a drafter can draft for rules that draw from q
    treeless_why: str = ""  # why a verifier is treeless
    prefixes: str = ""  # keys of the beginnings of texts whose KV a verifier has; see outrider.core.prefixes


_KINDS = get_type_hints(Worker) | {"role": str}


@dataclass(frozen=True, slots=True)
class _Entry:
    """A worker and how long each of its heartbeats counts."""

    worker: Worker
    ttl_s: float


class Registry:
    """The workers that are alive. Eventually consistent: a worker that died is listed until its key expires.

    After an outage of Redis that this object noticed, the workers that it knew before count as alive for one of
    their TTLs more: they had no way to say so. All methods raise Unavailable when Redis cannot be reached.
    """

    def __init__(self, redis: Client) -> None:
        self._redis = redis
        self._known: dict[str, _Entry] = {}  # as last listed
        self._out = False  # whether Redis could not be reached the last time
        self._spared: dict[str, float] = {}  # known before the outage, not seen since -> until when (monotonic)

    async def announce(self, worker: Worker, ttl_s: float) -> None:
        """Lists the worker for `ttl_s` seconds from now, replacing what it said before."""
        with translated(self._redis):
            async with self._redis.pipeline() as pipeline:
                pipeline.set(_WORKER + worker.worker_id, _dump(worker, ttl_s), px=round(ttl_s * 1000))
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
        try:
            seen = {entry.worker.worker_id: entry for entry in await self._entries()}
        except Unavailable:
            self._out = True
            raise
        now = time.monotonic()
        if self._out:
            self._out = False
            self._spared = {name: now + entry.ttl_s for name, entry in self._known.items()}
        self._spared = {name: end for name, end in self._spared.items() if name not in seen and end > now}
        self._known = {name: self._known[name] for name in self._spared} | seen
        return [entry.worker for _, entry in sorted(self._known.items()) if role in (None, entry.worker.role)]

    async def _entries(self) -> list[_Entry]:
        with translated(self._redis):
            ids: list[Any] = sorted(await self._redis.smembers(_IDS))  # bytes
            blobs: list[Any] = await self._redis.mget([_WORKER.encode() + name for name in ids]) if ids else []
            # A worker whose key expired puts itself back with its next heartbeat.
            if gone := [name for name, blob in zip(ids, blobs, strict=True) if blob is None]:
                await self._redis.srem(_IDS, *gone)
        return [entry for blob in blobs if blob and (entry := _load(blob))]


async def keep_announced(
    redis_url: str, describe: Callable[[], Worker], interval_s: float, changed: asyncio.Event | None = None
) -> None:
    """Announces `describe()` every `interval_s` seconds, and when `changed` is set, until cancelled; then withdraws it.

    The entry expires after three intervals without a heartbeat. A Redis that cannot be reached is logged once
    an outage and tried again with the next heartbeat. Raises ConfigError when the URL is malformed.
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
        await _leave(registry, describe().worker_id)
        await client.aclose()


async def _leave(registry: Registry, worker_id: str) -> None:
    try:
        await registry.withdraw(worker_id)
    except Unavailable:
        log.info("could not withdraw; the entry expires by itself")


def _dump(worker: Worker, ttl_s: float) -> str:
    return json.dumps(asdict(worker) | {"tokenizer_digest": worker.tokenizer_digest.hex(), "ttl_s": ttl_s})


def _load(blob: bytes) -> _Entry | None:
    try:
        values = loads(blob, "a worker's entry")
        # A newer worker may say more than we know, an older one less.
        known = {field.name: values[field.name] for field in fields(Worker) if field.name in values}
        worker = Worker(**known | {"tokenizer_digest": bytes.fromhex(values["tokenizer_digest"])})
        if worker.role not in get_args(Role):
            raise ValueError(f"{worker.role!r} is no role")
        for name, value in known.items():
            kind = _KINDS[name]
            if name != "tokenizer_digest" and not isinstance(value, (int, float) if kind is float else kind):
                raise TypeError(f"{name} is {reprlib.repr(value)}")
        return _Entry(worker, float(values["ttl_s"]))
    except (ArithmeticError, InternalError, KeyError, RecursionError, TypeError, ValueError) as error:
        log.warning("skipped a worker's entry: %s", error)
        return None
