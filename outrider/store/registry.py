"""The registry of live workers, which announce themselves under heartbeat keys that expire.

    outrider:{workers}:id:ID           a verifier (JSON)
    outrider:{workers}:ids             set: the verifiers' ids
    outrider:{workers}:drafter-id:ID   a drafter (JSON)
    outrider:{workers}:drafter-ids     set: the drafters' ids

Each role has keys of its own, so that a drafter's user in Redis can neither remove a verifier nor pose as one. All keys
have one hash tag, so that MGET works on a Redis Cluster. Drafters of an older version announce themselves among the
verifiers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import reprlib
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args, get_type_hints

from outrider.core.session.protocol import PROTOCOL, Origin
from outrider.errors import InternalError, Unavailable
from outrider.store.redis.client import Client, connect, load_object, redis_errors
from outrider.store.redis.redis_clock import RedisClock

TOP = -1  # the tier above all drafters: the verifiers
Role = Literal["verifier", "drafter"]

_IDS: dict[Role, str] = {"drafter": "outrider:{workers}:drafter-ids", "verifier": "outrider:{workers}:ids"}
_WORKER: dict[Role, str] = {"drafter": "outrider:{workers}:drafter-id:", "verifier": "outrider:{workers}:id:"}
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
    pass_s: float = 0.0  # of one token of one session at a verifier; 0: not known
    weights: str = ""  # digest of a verifier's weights; "": not known
    trained_for: str = ""  # digest of the target that a drafter was trained for; "": it drafts for any
    draws: bool = True  # whether a drafter can draft for rules that draw from q
    treeless_why: str = ""  # why a verifier is treeless
    cores: float = 0.0  # processor seconds that its process took for each second since the heartbeat before
    arm: str = ""  # how a verifier works with drafters now; see docs/control.md
    arm_reason: str = ""  # why, for people
    tokens_per_s: float = 0.0  # of all of a verifier's sessions, over its last steps
    plain_tokens_per_s: float = 0.0  # of as many sessions without drafts, by its estimate
    plain_error: float = 0.0  # of that, relative
    trusts: str = "*"  # names of drafters that a verifier lets draw from q, with spaces between them; "*": all
    prefixes: str = ""  # keys of prefixes whose KV a verifier has; see outrider.core.session.prefix_keys
    dtype: str = ""  # types in which a verifier has its weights and KV
    gate: str = ""  # id of the router that a drafter has dialed, which alone reaches it; "": it has an address
    protocol: int = PROTOCOL  # the protocol that it speaks; 0: an older version, which announces none

    @property
    def origin(self) -> Origin:
        """What a text that begins at this verifier depends on."""
        return Origin(self.protocol, self.weights, self.dtype)

    def lets_draw(self, drafter_id: str) -> bool:
        """Return whether a verifier takes a drafter under a rule that draws from q."""
        return self.trusts == "*" or drafter_id.rpartition("-")[0] in self.trusts.split()


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
                key, entry = _WORKER[worker.role] + worker.worker_id, dump_worker(worker, ttl_s)
                pipeline.set(key, entry, px=round(ttl_s * 1000))
                pipeline.sadd(_IDS[worker.role], worker.worker_id)
                await pipeline.execute()

    async def withdraw(self, worker: Worker) -> None:
        """Remove a worker. Succeeds if it is not there."""
        with redis_errors(self._redis):
            async with self._redis.pipeline() as pipeline:
                pipeline.delete(_WORKER[worker.role] + worker.worker_id)
                pipeline.srem(_IDS[worker.role], worker.worker_id)
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
        """Return all entries, the drafters' first: of two with one id the verifier's counts."""
        with redis_errors(self._redis):
            async with self._redis.pipeline(transaction=False) as pipeline:
                for key in _IDS.values():
                    pipeline.smembers(key)
                replies: list[Any] = await pipeline.execute()
            ids = [(role, name) for role, names in zip(_IDS, replies, strict=True) for name in sorted(names)]  # bytes
            blobs: list[Any] = (
                await self._redis.mget([_WORKER[role].encode() + name for role, name in ids]) if ids else []
            )
            for role, key in _IDS.items():  # a worker whose key expired adds itself again with its next heartbeat
                expired = [name for (its, name), blob in zip(ids, blobs, strict=True) if its == role and blob is None]
                if expired:
                    await self._redis.srem(key, *expired)
        found = (load_worker(blob, role) for (role, _), blob in zip(ids, blobs, strict=True) if blob)
        return [entry for entry in found if entry is not None]


async def keep_announced(
    redis_url: str,
    describe: Callable[[], Worker],
    interval_s: float,
    changed: asyncio.Event | None = None,
    clock: RedisClock | None = None,
) -> None:
    """Announce `describe()` every `interval_s` seconds, and when `changed` is set, until cancelled; then withdraw it.
    Each heartbeat also reads `clock`.

    The entry expires after three intervals without a heartbeat. An outage of Redis is logged once; the next heartbeat
    tries again. Raises ConfigError for a malformed URL.
    """
    client = connect(redis_url)
    registry = Registry(client)
    reachable = True
    changed = changed or asyncio.Event()
    ran = ProcessorShare()
    try:
        while True:
            try:
                await asyncio.gather(
                    registry.announce(replace(describe(), cores=ran.lately()), _MISSED_HEARTBEATS * interval_s),
                    _read_clock(client, clock),
                )
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
        await _withdraw(registry, describe())
        await client.aclose()


class ProcessorShare:
    """How many cores this process keeps busy."""

    def __init__(self) -> None:
        self._at, self._ran = time.monotonic(), time.process_time()
        self._latest = 0.0

    def lately(self) -> float:
        """Return the processor seconds for each second since the call before; after less than a second, the result of
        that call."""
        now, ran = time.monotonic(), time.process_time()
        if now - self._at >= 1.0:
            self._latest = round((ran - self._ran) / (now - self._at), 2)
            self._at, self._ran = now, ran
        return self._latest


async def _read_clock(client: Client, clock: RedisClock | None) -> None:
    """Read Redis' clock. A worker whose user in Redis may not is announced nevertheless, and has its own clock."""
    if clock is not None:
        try:
            await clock.read(client)
        except Unavailable as error:
            log.debug("Redis' time is not known: %s", error)


async def _withdraw(registry: Registry, worker: Worker) -> None:
    try:
        await registry.withdraw(worker)
    except Unavailable:
        log.info("could not withdraw; the entry expires by itself")


def dump_worker(worker: Worker, ttl_s: float) -> str:
    return json.dumps(asdict(worker) | {"tokenizer_digest": worker.tokenizer_digest.hex(), "ttl_s": ttl_s})


def load_worker(blob: bytes, listed_as: Role) -> _WorkerEntry | None:
    try:
        values = load_object(blob, "a worker's entry")
        # A newer worker may send fields unknown here, an older one fewer.
        known = {"protocol": 0} | {field.name: values[field.name] for field in fields(Worker) if field.name in values}
        worker = Worker(**known | {"tokenizer_digest": bytes.fromhex(values["tokenizer_digest"])})
        if worker.role not in get_args(Role):
            raise ValueError(f"{worker.role!r} is no role")
        if listed_as == "drafter" != worker.role:
            raise ValueError(f"a {worker.role} is listed among the drafters")
        for name, value in known.items():
            kind = _KINDS[name]
            if name != "tokenizer_digest" and not isinstance(value, (int, float) if kind is float else kind):
                raise TypeError(f"{name} is {reprlib.repr(value)}")
        return _WorkerEntry(worker, float(values["ttl_s"]))
    except (ArithmeticError, InternalError, KeyError, RecursionError, TypeError, ValueError) as error:
        log.warning("skipped a worker's entry: %s", error)
        return None
