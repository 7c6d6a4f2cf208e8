"""What must survive any process: a session's record and its log of durable tokens, fenced by the epoch.

    outrider:{ID}:session   hash: the record
    outrider:{ID}:log       stream: entries `t` (tokens, four bytes each, little-endian) under id
                            (start + 1)-0, and `finish` (a reason) under id LENGTH-1, behind all tokens so far

Both keys share a hash tag, so that the scripts run on a Redis Cluster, and expire together. *Durable* means
appended here. Everything a script does can be repeated: a retry after a lost reply changes nothing.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis

from outrider.core.contract import Contract, Plan
from outrider.core.digest import EMPTY
from outrider.errors import Conflict, NotFound, Superseded
from outrider.store.client import loads, translated

_PAGE = 1024  # entries read from Redis at once, so that a long log holds nobody up


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """What Redis knows of a session. The last six fields are the scripts' to change."""

    session_id: str
    tenant: str
    model: str
    tokenizer_digest: bytes
    contract: Contract
    answer_position: int  # position of the answer's first token
    plan: Plan
    verifier: str  # worker id
    drafters: tuple[str, ...]  # worker ids
    deadline: float | None  # absolute, in seconds since 1970; None: none
    epoch: int = 0
    owner: str = ""
    lease: float = 0.0  # until when the owner is alive, by Redis' clock, in seconds since 1970
    length: int = 0  # durable tokens, prompt included
    digest: int = EMPTY  # over them
    finished: str = ""  # why the generation ended; empty while it runs


@dataclass(frozen=True, slots=True)
class Log:
    """Durable tokens from a position on."""

    start: int
    tokens: tuple[int, ...]
    finished: str  # why the generation ended after them; empty if it has not


class Sessions:
    """All sessions. Methods raise Unavailable when Redis cannot be used, NotFound for an unknown session.

    Records and logs are dropped `ttl_s` seconds after their last change; owners count as dead `lease_s`
    seconds after their last one.
    """

    def __init__(self, redis: Redis, *, ttl_s: float, lease_s: float) -> None:
        self._redis = redis
        self._ttl_ms = round(ttl_s * 1000)
        self._lease_ms = round(lease_s * 1000)
        self._acquire, self._append, self._finish = (
            redis.register_script((files("outrider.store") / f"{name}.lua").read_text(encoding="utf-8"))
            for name in ("acquire", "append", "finish")
        )

    async def create(self, record: SessionRecord) -> None:
        """Stores a new session that nobody owns yet."""
        with translated(self._redis):
            async with self._redis.pipeline() as pipeline:
                pipeline.hset(_record_key(record.session_id), mapping=_dump(record))
                pipeline.pexpire(_record_key(record.session_id), self._ttl_ms)
                await pipeline.execute()

    async def acquire(self, session_id: str, expected: int, owner: str) -> OwnedSession:
        """Makes `owner` the session's owner under epoch `expected` + 1, if its epoch is still `expected`.

        `owner` is a name that is used for this one acquisition. Raises Superseded when somebody was faster.
        """
        reply = await self._run(self._acquire, session_id, expected, owner, self._lease_ms, self._ttl_ms)
        return OwnedSession(self, session_id, int(reply))

    async def get(self, session_id: str) -> SessionRecord:
        """The session's record."""
        with translated(self._redis):
            fields: dict[Any, Any] = await self._redis.hgetall(_record_key(session_id))
        if not fields:
            raise _missing(session_id)
        return _load(session_id, {name.decode(): value for name, value in fields.items()})

    async def read(self, session_id: str, start: int = 0) -> Log:
        """The durable tokens from position `start` on; none for a session without a log."""
        key, tokens, finished = _log_key(session_id), list[int](), ""
        with translated(self._redis):
            # The entry that holds `start` may begin before it.
            first: Any = await self._redis.xrevrange(key, f"{start + 1}-0", "-", count=1)
            low = first[0][0].decode() if first else "-"
            while page := await self._redis.xrange(key, low, "+", count=_PAGE):
                entries: Any = page
                for name, entry in entries:
                    if b"t" in entry:
                        skip = max(0, start + 1 - int(name.partition(b"-")[0]))
                        tokens.extend(_unpack(entry[b"t"])[skip:])
                    finished = entry.get(b"finish", b"").decode()
                low = "(" + entries[-1][0].decode()
        return Log(start, tuple(tokens), finished)

    async def _run(self, script: Any, session_id: str, *arguments: Any) -> Any:
        with translated(self._redis):
            reply = await script(keys=[_record_key(session_id), _log_key(session_id)], args=arguments)
        match reply:
            case [b"ok", value]:
                return value
            case [b"superseded", epoch, owner]:
                raise Superseded(f"session {session_id} belongs to {owner.decode()} since epoch {epoch}; do not retry")
            case [b"behind", epoch]:
                raise Conflict(f"session {session_id} is at epoch {epoch} in Redis, behind its owner; acquire it anew")
            case [b"gap", length]:
                raise Conflict(f"session {session_id} has {length} durable tokens; the append would leave a gap")
            case [b"conflict", length]:
                raise Conflict(f"session {session_id}: its {length} durable tokens differ from the appended ones")
        raise _missing(session_id)


class OwnedSession:
    """A session under one epoch of ours. Methods raise Superseded once somebody acquired a higher one.

    They raise Conflict when Redis holds an older epoch than ours, because it lost what it had.
    """

    def __init__(self, sessions: Sessions, session_id: str, epoch: int) -> None:
        self.session_id = session_id
        self.epoch = epoch
        self._sessions = sessions

    async def append(
        self,
        start: int,
        tokens: Sequence[int],
        digest: int,
        *,
        plan: Plan | None = None,
        verifier: str | None = None,
        drafters: Sequence[str] | None = None,
    ) -> int:
        """Appends `tokens` at position `start` and renews the lease; returns the durable length.

        `digest` is that of the session with these tokens. Tokens that are durable already are a success when
        they are the same and a Conflict when not; a gap is a Conflict too. Those of `plan`, `verifier`
        and `drafters` that are given replace the record's.
        """
        changes: list[str] = []
        if plan is not None:
            changes += ("plan", json.dumps(asdict(plan)))
        if verifier is not None:
            changes += ("verifier", verifier)
        if drafters is not None:
            changes += ("drafters", json.dumps(list(drafters)))
        store = self._sessions
        return int(
            await store._run(
                store._append,
                self.session_id,
                self.epoch,
                start,
                _pack(tokens),
                digest,
                store._lease_ms,
                store._ttl_ms,
                *changes,
            )
        )

    async def finish(self, reason: str) -> None:
        """Writes the log's last entry and gives the lease up. Repeating it changes nothing."""
        store = self._sessions
        await store._run(store._finish, self.session_id, self.epoch, reason, store._ttl_ms)


def _record_key(session_id: str) -> str:
    return f"outrider:{{{session_id}}}:session"


def _log_key(session_id: str) -> str:
    return f"outrider:{{{session_id}}}:log"


def _missing(session_id: str) -> NotFound:
    return NotFound(f"session {session_id}: there is none, or it expired")


def _pack(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def _unpack(blob: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(blob) // 4}I", blob)


def _dump(record: SessionRecord) -> dict[Any, Any]:
    return {
        "tenant": record.tenant,
        "model": record.model,
        "tokenizer_digest": record.tokenizer_digest,
        "contract": json.dumps(asdict(record.contract)),
        "answer_position": record.answer_position,
        "plan": json.dumps(asdict(record.plan)),
        "verifier": record.verifier,
        "drafters": json.dumps(record.drafters),
        "deadline": "" if record.deadline is None else repr(record.deadline),
        "epoch": record.epoch,
        "owner": record.owner,
        "lease": round(record.lease * 1000),
        "length": record.length,
        "digest": record.digest,
        "finished": record.finished,
    }


def _load(session_id: str, fields: dict[str, bytes]) -> SessionRecord:
    contract = loads(fields["contract"], "a session's contract")
    return SessionRecord(
        session_id=session_id,
        tenant=fields["tenant"].decode(),
        model=fields["model"].decode(),
        tokenizer_digest=fields["tokenizer_digest"],
        contract=Contract(**contract | {"stop_ids": tuple(contract["stop_ids"])}),
        answer_position=int(fields["answer_position"]),
        plan=Plan(**loads(fields["plan"], "a session's plan")),
        verifier=fields["verifier"].decode(),
        drafters=tuple(json.loads(fields["drafters"])),
        deadline=float(fields["deadline"]) if fields["deadline"] else None,
        epoch=int(fields["epoch"]),
        owner=fields["owner"].decode(),
        lease=int(fields["lease"]) / 1000,
        length=int(fields["length"]),
        digest=int(fields["digest"]),
        finished=fields["finished"].decode(),
    )
