"""What Redis knows of a session, and how it is written there."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.core.contract import OFF, Contract, Plan
from outrider.core.digest import EMPTY
from outrider.errors import InternalError
from outrider.store.client import loads, ours

TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Turn:
    """What a generation promised; fixed with its start."""

    contract: Contract
    stops: tuple[str, ...]  # stop strings
    answer_position: int  # position of the answer's first token
    deadline: float | None  # absolute, in seconds since 1970; None: none
    request: str = ""  # names the request that it answers, where that came with an idempotency key


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """What Redis knows of a session. A closed one is a tombstone: all about its text is gone."""

    session_id: str
    tenant: str
    model: str
    tokenizer_digest: bytes
    generation: int = 0  # the latest, from 1; 0: none yet
    turn: Turn | None = None  # the latest generation's
    plan: Plan = OFF
    verifier: str = ""  # worker id: where the session's KV is
    drafters: tuple[str, ...] = ()  # worker ids
    usage: str = ""  # the router's own text, as written by the latest release or finish of this generation
    epoch: int = 0
    owner: str = ""
    lease: float = 0.0  # until when the owner counts as alive, by Redis' clock, seconds since 1970; 0: released
    resumable: float = 0.0  # until when an unfinished generation can be resumed if its owner is gone, likewise
    length: int = 0  # durable tokens, prompts included
    digest: int = EMPTY  # over them
    finished: str = ""  # why the latest generation ended; empty while it has not, and before the first
    closed: bool = False

    @property
    def running(self) -> bool:
        """Whether there is a generation that has not ended."""
        return self.generation > 0 and not self.finished


@dataclass(frozen=True, slots=True)
class Log:
    """Durable tokens from a position on."""

    start: int
    tokens: tuple[int, ...]
    logprobs: bytes  # of the last of them, equally many bytes a token: those of the latest generation's answer
    finished: str  # why the latest generation ended after them; empty if it has not


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids as the log holds them: four bytes each, little-endian."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpack(blob: bytes) -> tuple[int, ...]:
    """Undoes `pack`. Raises InternalError for what is none."""
    with ours("a session's tokens"):
        return struct.unpack(f"<{len(blob) // TOKEN_BYTES}I", blob)


def stride(tokens: int, logprobs: bytes) -> int:
    """Bytes of log-probabilities a token, 0 without any. Raises InternalError when they do not divide evenly."""
    if not logprobs:
        return 0
    if tokens == 0 or len(logprobs) % tokens:
        raise InternalError(f"{len(logprobs)} bytes of log-probabilities for {tokens} tokens: not the same for each")
    return len(logprobs) // tokens


def dump_plan(plan: Plan) -> str:
    """A plan as a record's field."""
    return json.dumps(asdict(plan))


def dump_turn(turn: Turn | None) -> str:
    """A turn as a record's field."""
    return json.dumps(asdict(turn)) if turn is not None else ""


def load_turn(blob: bytes) -> Turn | None:
    """Undoes `dump_turn`. Raises InternalError for what is none."""
    if not blob:
        return None
    values = loads(blob, what := "a session's turn")
    with ours(what):
        return Turn(
            contract=Contract(**values["contract"]),
            stops=tuple(map(str, values["stops"])),
            answer_position=int(values["answer_position"]),
            deadline=None if values["deadline"] is None else float(values["deadline"]),
            request=str(values["request"]),
        )


def dump(record: SessionRecord) -> dict[str, str | bytes]:
    """A record as a hash's fields. Numbers that scripts change are decimal; times are in milliseconds."""
    return {
        "tenant": record.tenant,
        "model": record.model,
        "tokenizer_digest": record.tokenizer_digest,
        "generation": str(record.generation),
        "turn": dump_turn(record.turn),
        "plan": dump_plan(record.plan),
        "verifier": record.verifier,
        "drafters": json.dumps(record.drafters),
        "usage": record.usage,
        "epoch": str(record.epoch),
        "owner": record.owner,
        "lease": str(round(record.lease * 1000)),
        "resumable": str(round(record.resumable * 1000)),
        "length": str(record.length),
        "digest": str(record.digest),
        "finished": record.finished,
        "closed": "1" if record.closed else "",
    }


def load(session_id: str, fields: Mapping[str, bytes]) -> SessionRecord:
    """Undoes `dump`. Of a closed session fields about its text are missing. Raises InternalError for what is none."""
    with ours("a session's record"):
        return _load(session_id, fields)


def _load(session_id: str, fields: Mapping[str, bytes]) -> SessionRecord:
    plan: Any = fields.get("plan")
    return SessionRecord(
        session_id=session_id,
        tenant=fields["tenant"].decode(),
        model=fields["model"].decode(),
        tokenizer_digest=fields["tokenizer_digest"],
        generation=int(fields["generation"]),
        turn=load_turn(fields.get("turn", b"")),
        plan=Plan(**loads(plan, "a session's plan")) if plan else OFF,
        verifier=fields.get("verifier", b"").decode(),
        drafters=tuple(map(str, json.loads(fields.get("drafters", b"[]")))),
        usage=fields.get("usage", b"").decode(),
        epoch=int(fields["epoch"]),
        owner=fields["owner"].decode(),
        lease=int(fields["lease"]) / 1000,
        resumable=int(fields["resumable"]) / 1000,
        length=int(fields["length"]),
        digest=int(fields["digest"]),
        finished=fields["finished"].decode(),
        closed=bool(fields["closed"]),
    )
