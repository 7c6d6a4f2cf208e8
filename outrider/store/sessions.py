"""The durable state of sessions: a record and a log of tokens for each, fenced by epoch and owner.

    outrider:{ID}:session   hash: the record (records.py)
    outrider:{ID}:log       stream: `t` (tokens, four bytes each, little-endian) and, if they were requested, `l`
                            (log-probabilities, equally many bytes for each of the tokens) under id (start + 1)-0;
                            `finish` (a reason) under id LENGTH-GENERATION, behind all tokens so far
    outrider:{leases}       the index that finds generations which were left behind (leases.py)
    outrider:idempotency:H  the session that holds an idempotency key, and the fingerprint of its request

A session's two keys share a hash tag, so that the scripts run on a Redis Cluster, and expire together. *Durable* means
appended here. Every script may be repeated: a retry after a lost reply changes nothing, and neither does a first
attempt that arrives after its retry. The scripts use nothing that Redis 6.2 lacks.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from importlib.resources import files
from typing import Any

from outrider.core.session.contract import OFF, Plan
from outrider.core.session.digest import EMPTY, extend
from outrider.core.session.protocol import Origin
from outrider.errors import Busy, Conflict, InternalError, InvalidRequest, NotFound, Superseded, Unavailable
from outrider.offload import offload_if_long
from outrider.store.leases import Lease, Leases
from outrider.store.log_recovery import missing_entries, restored_record
from outrider.store.records import (
    SessionLog,
    SessionRecord,
    SessionTurn,
    dump,
    dump_plan,
    dump_turn,
    load,
    load_turn,
    pack,
    stride,
    unpack,
)
from outrider.store.redis.client import REDIS_ERRORS, Client, decoding, load_object, redis_errors, unavailable
from outrider.store.redis.group_commit import GroupCommit, script_for_many

__all__ = [
    "ABANDONED",
    "CANCELLED",
    "OwnedSession",
    "SessionLog",
    "SessionRecord",
    "SessionTurn",
    "Sessions",
    "claim_name",
]

ABANDONED = "abandoned"  # the owner was gone and the generation was not resumed in time
CANCELLED = "cancelled"

_PAGE = 1024  # entries per read, so that a long log does not block other clients
_ATTEMPTS = 4  # at a compare-and-set that other writers keep winning
_TOMBSTONE_S = 60.0  # at least; longer than any owner goes without a write
_GROUPED = ("append", "renew", "release", "finish")  # scripts of owners, which are many and write all the time
_SCRIPTS = (*_GROUPED, "create", "acquire", "begin", "close", "restore", "abandon")


class Sessions:
    """All sessions. Methods raise Unavailable when Redis cannot be used, NotFound for an unknown or closed session.

    Records, logs and idempotency keys are dropped `ttl_s` seconds after their last change. An owner counts as dead
    `lease_s` seconds after its last write; the generation that it leaves can be resumed for `resume_ttl_s` more.
    """

    def __init__(self, redis: Client, *, ttl_s: float, lease_s: float, resume_ttl_s: float) -> None:
        self._redis = redis
        self._ttl_ms = round(ttl_s * 1000)
        self._times = (round(lease_s * 1000), round(resume_ttl_s * 1000), self._ttl_ms)
        self._tombstone_ms = round(max(2 * lease_s, _TOMBSTONE_S) * 1000)
        prelude = _source("prelude")
        self._scripts = {name: redis.register_script(prelude + _source(name)) for name in _SCRIPTS}
        appends = redis.register_script(script_for_many(prelude + _source("append")))
        self._group_commit = GroupCommit(redis, self._scripts["append"], appends)
        self.leases = Leases(redis)

    async def create(self, session_id: str, tenant: str, model: str, tokenizer_digest: bytes) -> bool:
        """Store a new session without tokens and without an owner.

        Return False, and change nothing, if it was there already: also if only the first reply was lost.
        """
        fields = dump(SessionRecord(session_id, tenant, model, tokenizer_digest))
        (created,) = await self._run("create", session_id, *_flat(fields))
        return bool(created)

    async def begin(
        self,
        session_id: str,
        expected: int,
        owner: str,
        turn: SessionTurn,
        start: int,
        tokens: Sequence[int],
        digest: int,
        *,
        plan: Plan = OFF,
        verifier: str = "",
    ) -> OwnedSession:
        """Begin the next generation under epoch `expected` + 1: store a turn, and its prompt's tokens at position
        `start`.

        `start` is the session's length, `digest` that of the session with these tokens; there may be none if the
        session has some. `owner` is a name used for this one call. An empty `verifier` keeps the record's. A generation
        that neither ended nor can be resumed any more ends as "abandoned".

        Raises Superseded when the epoch moved, Busy when the latest generation has not ended and is owned or can be
        resumed, Conflict when `start` is not the length.
        """
        if start == 0 and not tokens:
            raise InvalidRequest("prompt", "is empty; a session's first turn needs at least one token")
        (epoch, length), lease = await self._run_listed(
            "begin",
            session_id,
            expected,
            owner,
            start,
            pack(tokens),
            digest,
            dump_turn(turn),
            dump_plan(plan),
            verifier,
            ABANDONED,
        )
        return OwnedSession(self, session_id, epoch, owner, length, lease)

    async def acquire(self, session_id: str, expected: int, owner: str) -> OwnedSession:
        """Make `owner` the session's owner under epoch `expected` + 1, if its epoch is still `expected`.

        `owner` is a name that is used for this one acquisition. Raises Superseded when another owner was first.
        """
        epoch, length = await self._run("acquire", session_id, expected, owner)
        return OwnedSession(self, session_id, epoch, owner, length)

    async def get(self, session_id: str, tenant: str | None = None) -> SessionRecord:
        """Return the session's record. A closed session's record is there for a while, with `closed` set.

        With a `tenant`, a session of another tenant raises the same error as an unknown one, and takes as long.
        """
        with redis_errors(self._redis):
            if tenant is not None:  # read alone, because reading a whole record takes longer than finding none
                owner: Any = await self._redis.hget(_record_key(session_id), "tenant")
                if owner != tenant.encode():
                    raise _missing(session_id)
            fields: Any = await self._redis.hgetall(_record_key(session_id))
        if not fields:
            raise _missing(session_id)
        return load(session_id, {name.decode(): value for name, value in fields.items()})

    async def read(self, session_id: str, start: int = 0) -> SessionLog:
        """Return the durable tokens from position `start` on, as they were at one moment.

        Raises Unavailable when the log was dropped meanwhile.
        """
        key = _log_key(session_id)
        tokens, logprobs = list[int](), bytearray()
        with redis_errors(self._redis):
            names = ["generation", "finished", "length", "turn", "closed"]
            fields: Any = await self._redis.hmget(_record_key(session_id), names)
            if fields[0] is None or fields[4]:
                raise _missing(session_id)
            with decoding("a session's record"):
                length, generation, finished = int(fields[2]), int(fields[0]), fields[1].decode()
            turn = load_turn(fields[3])
            answer = turn.answer_position if turn is not None else length
            last = f"{length}-{generation}"  # later writes come behind this id
            first: Any = await self._redis.xrevrange(key, f"{start + 1}-0", "-", count=1)
            low = first[0][0].decode() if first else "-"
            while page := await self._redis.xrange(key, low, last, count=_PAGE):
                entries: Any = page
                for name, entry in entries:
                    if b"t" not in entry:
                        continue
                    position = int(name.partition(b"-")[0]) - 1
                    entry_tokens, entry_logprobs = unpack(entry[b"t"]), entry.get(b"l", b"")
                    tokens += entry_tokens[max(0, start - position) :]
                    logprobs += entry_logprobs[
                        max(0, start - position, answer - position) * stride(len(entry_tokens), entry_logprobs) :
                    ]
                low = "(" + entries[-1][0].decode()
        if start + len(tokens) < length:
            raise Unavailable(f"session {session_id} was closed or lost tokens while it was read; try again")
        return SessionLog(start, tuple(tokens), bytes(logprobs), finished)

    async def close(self, session_id: str) -> None:
        """End a session and drop its log; a running generation ends as "cancelled". Repeating it changes nothing.

        A tombstone under a higher epoch stays for a while: the owner's next write raises Superseded and restores
        nothing.
        """
        await self._run("close", session_id, self._tombstone_ms, EMPTY, CANCELLED)

    async def ids(self) -> AsyncIterator[str]:
        """Yield the sessions that Redis holds, closed ones included; those that come or go meanwhile may be missed."""
        with redis_errors(self._redis):
            async for key in self._redis.scan_iter(match=_record_key("*"), count=_PAGE):
                yield key.decode().partition("{")[2].rpartition("}")[0]

    async def left_behind(self, lease: Lease) -> bool:
        """Return whether a session has a generation whose owner is gone and that can no longer be resumed.

        If not, its entry in the index moves to where it is due again.
        """
        return await self._check_lease(lease, "")

    async def abandon(self, lease: Lease) -> bool:
        """End a session's generation as "abandoned" if it is left behind.

        Return False, and change nothing but the index, if it is not: also if another router has just ended it.
        """
        return await self._check_lease(lease, ABANDONED)

    async def runs(self, session_id: str) -> bool:
        """Return whether a session has a generation that has not ended and can still be resumed, by Redis' clock."""
        left_behind, end_ms = await self._run("abandon", session_id, "")
        return bool(end_ms) and not left_behind

    async def lapsed(self, session_id: str) -> bool:
        """Return whether a session has a generation that has not ended and can be resumed no more, by Redis' clock."""
        left_behind, _ = await self._run("abandon", session_id, "")
        return bool(left_behind)

    async def list_lease(self, session_id: str) -> None:
        """Add a generation that has not ended to the index of leases, unless it is there."""
        _, end_ms = await self._run("abandon", session_id, "")
        if end_ms:
            await self.leases.add_missing(session_id, end_ms)

    async def claimed(self, tenant: str, key: str, fingerprint: bytes) -> str:
        """Return the session that holds a tenant's idempotency key; "" if none does.

        `fingerprint` identifies the request. Raises InvalidRequest when the key came with another request before.
        """
        with redis_errors(self._redis):
            blob: Any = await self._redis.get(f"outrider:idempotency:{claim_name(tenant, key)}")
        return "" if blob is None else _claimant(blob, fingerprint)

    async def claim(self, tenant: str, key: str, fingerprint: bytes, session_id: str) -> str:
        """Claim a tenant's idempotency key for a session; return the session that holds it, this one or an earlier one.

        Raises as `claimed`.
        """
        name = f"outrider:idempotency:{claim_name(tenant, key)}"
        claim = json.dumps({"session_id": session_id, "fingerprint": fingerprint.hex()})
        blob: Any = None
        with redis_errors(self._redis):
            while blob is None:  # the key may expire between the two commands
                if await self._redis.set(name, claim, nx=True, px=self._ttl_ms):
                    return session_id
                blob = await self._redis.get(name)
        return _claimant(blob, fingerprint)

    async def _restore(
        self, owned: OwnedSession, record: SessionRecord, tokens: Sequence[int], logprobs: bytes
    ) -> SessionRecord:
        """Read the record and write once with compare-and-set; return the record after it. Raises _Changed when the
        session was written in between."""
        try:
            seen = await self.get(owned.session_id)
        except NotFound:
            seen = None
        after = await offload_if_long(tokens, restored_record, seen, record, owned.epoch, owned.owner, tokens)
        names = ("epoch", "owner", "length", "digest", "generation", "finished")
        before = [dump(seen)[name] if seen is not None else "" for name in names]
        fields = dump(after)
        del fields["lease"], fields["resumable"]  # the script sets these by Redis' clock
        log = missing_entries(seen.length if seen is not None else 0, after, tokens, logprobs)
        _, owned.lease = await self._run_listed("restore", owned.session_id, *before, len(fields), *_flat(fields), *log)
        return after

    async def _check_lease(self, lease: Lease, reason: str) -> bool:
        found, end_ms = await self._run("abandon", lease.session_id, reason)
        await self.leases.move(lease, end_ms)
        return bool(found)

    async def _run_listed(self, script: str, session_id: str, *arguments: Any) -> tuple[Any, Lease | None]:
        """Do what `_run` does, and add the session to the index of leases at the same time.

        A session without its entry waits for the next scan of all sessions, so a failure to add it is no error.
        """
        lease_ms, resume_ttl_ms, _ = self._times
        outcomes: Any = await asyncio.gather(
            self._run(script, session_id, *arguments),
            self.leases.add(session_id, lease_ms + resume_ttl_ms),
            return_exceptions=True,
        )
        reply, listed = outcomes
        if isinstance(reply, BaseException):
            raise reply
        if isinstance(listed, BaseException) and not isinstance(listed, Unavailable):
            raise listed
        return reply, listed if isinstance(listed, Lease) else None

    async def _run(self, script: str, session_id: str, *arguments: Any) -> Any:
        """Return what a script replied after "ok"; raise its refusals as errors."""
        keys = [_record_key(session_id), _log_key(session_id)]
        args = [*self._times, *arguments]
        if script in _GROUPED:
            try:
                reply = await self._group_commit.run(self._scripts[script], keys, args)
            except REDIS_ERRORS as error:
                raise unavailable(self._redis, error) from None
        else:
            with redis_errors(self._redis):
                reply = await self._scripts[script](keys=keys, args=args)
        return _values(script, session_id, reply)


class OwnedSession:
    """A session under one epoch of ours. Methods raise Superseded once another owner has it or it was closed.

    They raise Conflict or NotFound when Redis holds less than it did, because it lost data: call `restore` then. Calls
    run one at a time, so that a queued call uses the epoch that a restore before it reached.
    """

    def __init__(
        self, sessions: Sessions, session_id: str, epoch: int, owner: str, length: int, lease: Lease | None = None
    ) -> None:
        self.session_id = session_id
        self.epoch = epoch
        self.owner = owner
        self.lease = lease  # its entry in the index, if this object wrote it
        self._sessions = sessions
        self._length = length  # durable tokens, as far as this object knows
        self._lock = asyncio.Lock()

    async def append(
        self,
        start: int,
        tokens: Sequence[int],
        digest: int,
        *,
        logprobs: bytes = b"",
        plan: Plan | None = None,
        verifier: str | None = None,
        origin: Origin | None = None,
        drafters: Sequence[str] | None = None,
    ) -> int:
        """Append `tokens` at position `start` and renew the lease; return the durable length.

        `digest` is that of the session with these tokens; `logprobs` are equally many bytes for each of them, or none
        at all. Tokens that are durable already are a success if they are the same and a Conflict if not; a gap is a
        Conflict too, and so are new tokens for a generation that has ended. Those of `plan`, `verifier`, `origin` and
        `drafters` that are given replace the record's, unless the log has gone beyond these tokens.
        """
        changes: dict[str, str | bytes] = {}
        if plan is not None:
            changes["plan"] = dump_plan(plan)
        if verifier is not None:
            changes["verifier"] = verifier
        if origin is not None:
            changes["origin"] = origin.dump()
        if drafters is not None:
            changes["drafters"] = json.dumps(list(drafters))
        bytes_per_token = stride(len(tokens), logprobs)
        async with self._lock:
            (length,) = await self._run(
                "append", start, pack(tokens), logprobs, bytes_per_token, digest, *_flat(changes)
            )
            self._length = max(self._length, length)
        return int(length)

    async def renew(self) -> None:
        """Renew the lease, unless it was given up, and the session's time to live."""
        async with self._lock:
            await self._run("renew", self._length)

    async def release(self, usage: str) -> None:
        """Give the lease up: from now on any router may resume, for `resume_ttl_s`. Repeating it changes nothing."""
        async with self._lock:
            await self._run("release", self._length, usage)

    async def finish(self, reason: str, usage: str, kept: Sequence[int] | None = None) -> None:
        """Write the log's last entry and give the lease up. Repeating it changes nothing.

        `kept`: all tokens before the generation's response, which is dropped; None: it is kept.
        """
        dropping: tuple[Any, ...] = ()
        async with self._lock:
            if kept is not None:
                self._length = len(kept)
                dropping = pack(kept), await offload_if_long(kept, extend, EMPTY, kept)
            await self._run("finish", self._length, reason, usage, *dropping)
        if self.lease is not None:
            self._sessions.leases.queue_removal(self.lease)
            self.lease = None

    async def restore(self, record: SessionRecord, tokens: Sequence[int], logprobs: bytes) -> None:
        """Restore what Redis lost of this session, under epoch + 1 or the epoch that an earlier try reached.

        `record` is the session as the owner has it, `tokens` all of its tokens, `logprobs` those of the latest
        response, from its first token on. Log-probabilities and finish entries of earlier generations are not restored.
        Safe to repeat. Raises Superseded when another owner has a later epoch or the session is closed, Conflict when
        Redis holds another text.
        """
        async with self._lock:
            for attempt in range(_ATTEMPTS):
                try:
                    after = await self._sessions._restore(self, record, tokens, logprobs)
                except _SessionChanged:
                    if attempt == _ATTEMPTS - 1:
                        raise
                else:
                    self.epoch, self._length = after.epoch, after.length
                    return

    async def _run(self, script: str, *arguments: Any) -> Any:
        return await self._sessions._run(script, self.session_id, self.epoch, self.owner, *arguments)


class _SessionChanged(Conflict):
    """The session was written between a read and a compare-and-set."""


def claim_name(tenant: str, key: str) -> str:
    """Return the name under which a tenant's idempotency key is claimed. The key itself is not stored."""
    return hashlib.sha256(json.dumps([tenant, key]).encode()).hexdigest()


def _claimant(blob: bytes, fingerprint: bytes) -> str:
    """Return the session that a claim is for. Raises InvalidRequest if it came with another request."""
    claim = load_object(blob, what := "an idempotency key's entry")
    with decoding(what):
        session_id, claimed_by = str(claim["session_id"]), claim["fingerprint"]
    if claimed_by != fingerprint.hex():
        raise InvalidRequest("idempotency_key", "came with another request before; use a new key for a new request")
    return session_id


def _source(script: str) -> str:
    return (files("outrider.store") / f"scripts/{script}.lua").read_text(encoding="utf-8")


def _record_key(session_id: str) -> str:
    return f"outrider:{{{session_id}}}:session"


def _log_key(session_id: str) -> str:
    return f"outrider:{{{session_id}}}:log"


def _values(script: str, session_id: str, reply: Any) -> Any:
    """Return what a script replied after "ok"; raise its refusals as errors."""
    match reply:
        case [b"ok", *values]:
            return values
        case [b"missing"]:
            raise _missing(session_id)
        case [b"closed"]:
            raise Superseded(f"session {session_id} was closed; do not retry")
        case [b"superseded", epoch, owner]:
            raise Superseded(f"session {session_id} belongs to {owner.decode()} since epoch {epoch}; do not retry")
        case [b"behind", epoch]:
            raise Conflict(f"session {session_id} is at epoch {epoch} in Redis, behind its owner; restore it")
        case [b"gap", length]:
            raise Conflict(f"session {session_id} has {length} durable tokens, fewer than its owner; restore it")
        case [b"conflict", length]:
            raise Conflict(f"session {session_id}: its {length} durable tokens are not what the caller has")
        case [b"busy"]:
            raise Busy(f"session {session_id}: its latest generation has not ended; resume it, cancel it, or wait")
        case [b"ended", reason]:
            ended = f"has ended ({reason.decode()})" if reason else "has not begun"
            raise Conflict(f"session {session_id}: its generation {ended} and takes no tokens")
        case [b"changed"]:
            raise _SessionChanged(f"session {session_id} changes while it is being restored; try again")
    raise InternalError(f"script {script} replied {reply!r}")


def _missing(session_id: str) -> NotFound:
    return NotFound(f"session {session_id} does not exist, or was closed or expired")


def _flat(fields: dict[str, str | bytes]) -> list[str | bytes]:
    return [part for pair in fields.items() for part in pair]
