"""A session's record and log in Redis, and how they are encoded there."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.core.session.contract import OFF, Adapter, Contract, Grammar, Plan
from outrider.core.session.digest import EMPTY
from outrider.core.session.protocol import Origin
from outrider.errors import InternalError
from outrider.store.redis.client import decoding, load_object

TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """The terms of a generation, fixed at its start."""

    contract: Contract
    stops: tuple[str, ...]  # stop strings
    answer_position: int  # position of the response's first token
    deadline: float | None  # in seconds since 1970, by Redis' clock; None: no deadline
    request: str = ""  # name of the request, if it came with an idempotency key
    include_stop: bool = False  # the text has the stop string that ends it, or a stop id's text
    special_tokens: bool = False  # whether special tokens have text
    within_reasoning: bool = False  # the response goes on with reasoning that the prompt's last message has begun


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session's record in Redis. A closed session's record is a tombstone: everything about its text is gone."""

    session_id: str
    tenant: str
    model: str
    tokenizer_digest: bytes
    generation: int = 0  # number of the latest generation, from 1; 0: none yet
    turn: SessionTurn | None = None  # of the latest generation
    plan: Plan = OFF
    verifier: str = ""  # worker id of the verifier that has the session's KV
    origin: Origin | None = None  # of the latest generation's text; None: no token of it is durable yet
    drafters: tuple[str, ...] = ()  # worker ids
    usage: str = ""  # the router's text, written by the latest release or finish of this generation
    epoch: int = 0
    owner: str = ""
    lease: float = 0.0  # end of the owner's lease by Redis' clock, seconds since 1970; 0: released
    resumable: float = 0.0  # end of the time in which an unfinished generation can be resumed, as `lease`
    length: int = 0  # durable tokens, prompts included
    digest: int = EMPTY  # over the durable tokens
    finished: str = ""  # why the latest generation ended; empty while it has not, and before the first one
    closed: bool = False

    @property
    def running(self) -> bool:
        """Whether a generation has begun and not ended."""
        return self.generation > 0 and not self.finished


@dataclass(frozen=True, slots=True)
class SessionLog:
    """Durable tokens from a position on."""

    start: int
    tokens: tuple[int, ...]
    logprobs: bytes  # of the latest generation's response, equally many bytes for each of its tokens
    finished: str  # why the latest generation ended after these tokens; empty if it has not


def pack(tokens: Sequence[int]) -> bytes:
    """Encode token ids for the log: four bytes each, little-endian."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpack(blob: bytes) -> tuple[int, ...]:
    """Decode what `pack` encoded. Raises InternalError for anything else."""
    with decoding("a session's tokens"):
        return struct.unpack(f"<{len(blob) // TOKEN_BYTES}I", blob)


def stride(tokens: int, logprobs: bytes) -> int:
    """Return the bytes of log-probabilities per token, 0 without any. Raises InternalError if they do not divide
    evenly."""
    if not logprobs:
        return 0
    if tokens == 0 or len(logprobs) % tokens:
        raise InternalError(f"{len(logprobs)} bytes of log-probabilities for {tokens} tokens: not the same for each")
    return len(logprobs) // tokens


def dump_plan(plan: Plan) -> str:
    """Encode a plan as a field of the record."""
    return json.dumps(asdict(plan))


def dump_turn(turn: SessionTurn | None) -> str:
    """Encode a turn as a field of the record."""
    return json.dumps(asdict(turn)) if turn is not None else ""


_LATER = ("include_stop", "special_tokens", "within_reasoning")  # of a turn, missing in records of older routers


def load_turn(blob: bytes) -> SessionTurn | None:
    """Decode what `dump_turn` encoded. Raises InternalError for anything else."""
    if not blob:
        return None
    values = load_object(blob, what := "a session's turn")
    with decoding(what):
        return SessionTurn(
            contract=_load_contract(values["contract"]),
            stops=tuple(map(str, values["stops"])),
            answer_position=int(values["answer_position"]),
            deadline=None if values["deadline"] is None else float(values["deadline"]),
            request=str(values["request"]),
            **{name: bool(values.get(name)) for name in _LATER},
        )


def _load_contract(values: dict[str, Any]) -> Contract:
    grammar, adapter = values.pop("grammar", None), values.pop("adapter", None)
    return Contract(**values, grammar=grammar and Grammar(**grammar), adapter=adapter and Adapter(**adapter))


def dump(record: SessionRecord) -> dict[str, str | bytes]:
    """Encode a record as the fields of a hash. Numbers that scripts change are decimal; times are in milliseconds."""
    return {
        "tenant": record.tenant,
        "model": record.model,
        "tokenizer_digest": record.tokenizer_digest,
        "generation": str(record.generation),
        "turn": dump_turn(record.turn),
        "plan": dump_plan(record.plan),
        "verifier": record.verifier,
        "origin": record.origin.dump() if record.origin else "",
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
    """Decode what `dump` encoded. Fields about the text are missing in a closed session. Raises InternalError for
    anything else."""
    with decoding("a session's record"):
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
        plan=Plan(**load_object(plan, "a session's plan")) if plan else OFF,
        verifier=fields.get("verifier", b"").decode(),
        origin=Origin.load(fields.get("origin", b"").decode()),
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
