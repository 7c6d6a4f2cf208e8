"""What the scripts mean: a session store in plain Python, slow, in memory, with a clock that is passed in.

The same operations with the same names, arguments and errors as `outrider.store.sessions`, but not async. A `Store`
can be copied and put back, which is how a Redis that lost its last writes looks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from outrider.core.session.contract import OFF, Plan
from outrider.core.session.digest import EMPTY, extend
from outrider.core.session.protocol import Origin
from outrider.errors import Busy, Conflict, InvalidRequest, NotFound, Superseded
from outrider.store.records import SessionLog, SessionRecord, SessionTurn


@dataclass
class Session:
    """One session as the store holds it."""

    record: SessionRecord
    expires: float
    tokens: list[int] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)  # one a token, b"" for one without
    ends: dict[int, tuple[int, str]] = field(default_factory=dict)  # generation -> length, reason


@dataclass(frozen=True)
class State:
    """All that a store held at some moment."""

    sessions: dict[str, Session]
    claims: dict[tuple[str, str], tuple[bytes, str, float]]


class Store:
    """All sessions. `now` gives seconds, by any clock of the caller."""

    def __init__(self, *, ttl_s: float, lease_s: float, resume_ttl_s: float, now: Callable[[], float]) -> None:
        self.ttl_s, self.lease_s, self.resume_ttl_s = ttl_s, lease_s, resume_ttl_s
        self.now = now
        self.sessions: dict[str, Session] = {}
        self.claims: dict[tuple[str, str], tuple[bytes, str, float]] = {}  # fingerprint, session, expiry

    def saved(self) -> State:
        """A copy of everything, for `lose`."""
        return copy.deepcopy(State(self.sessions, self.claims))

    def lose(self, saved: State) -> None:
        """Goes back to an earlier state: Redis lost what was written since."""
        state = copy.deepcopy(saved)
        self.sessions, self.claims = state.sessions, state.claims

    def create(self, session_id: str, tenant: str, model: str, tokenizer_digest: bytes) -> bool:
        if self.find(session_id) is not None:
            return False
        record = SessionRecord(session_id, tenant, model, tokenizer_digest)
        self.sessions[session_id] = Session(record, self.now() + self.ttl_s)
        return True

    def begin(
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
    ) -> Owned:
        if start == 0 and not tokens:
            raise InvalidRequest("prompt", "is empty")
        session = self._open(session_id)
        record = session.record
        if not self._repeated(record, expected, owner):
            if record.epoch != expected:
                raise Superseded(session_id)
            if record.running and record.resumable > self.now():
                raise Busy(session_id)
            if start != record.length:
                raise Conflict(session_id)
            if record.running:
                session.ends[record.generation] = (record.length, "abandoned")
            session.tokens += tokens
            session.logprobs += [b""] * len(tokens)
            session.record = replace(
                record,
                generation=record.generation + 1,
                turn=turn,
                plan=plan,
                verifier=verifier or record.verifier,
                origin=None,
                drafters=(),
                usage="",
                epoch=expected + 1,
                owner=owner,
                length=len(session.tokens),
                digest=digest if tokens else record.digest,
                finished="",
            )
            self.lend(session)
            self.touch(session)
        return Owned(self, session_id, expected + 1, owner, session.record.length)

    def acquire(self, session_id: str, expected: int, owner: str) -> Owned:
        session = self._open(session_id)
        if not self._repeated(session.record, expected, owner):
            if session.record.epoch != expected:
                raise Superseded(session_id)
            session.record = replace(session.record, epoch=expected + 1, owner=owner)
            self.lend(session)
            self.touch(session)
        return Owned(self, session_id, expected + 1, owner, session.record.length)

    def get(self, session_id: str, tenant: str | None = None) -> SessionRecord:
        session = self.find(session_id)
        if session is None or tenant not in (None, session.record.tenant):
            raise NotFound(session_id)
        return session.record

    def read(self, session_id: str, start: int = 0) -> SessionLog:
        session = self._open(session_id)
        turn = session.record.turn
        answer = turn.answer_position if turn is not None else session.record.length
        logprobs = b"".join(session.logprobs[max(start, answer) :])
        return SessionLog(start, tuple(session.tokens[start:]), logprobs, session.record.finished)

    def close(self, session_id: str) -> None:
        session = self.find(session_id)
        if session is None or session.record.closed:
            return
        record = session.record
        tombstone = SessionRecord(
            session_id,
            record.tenant,
            record.model,
            record.tokenizer_digest,
            generation=record.generation,
            epoch=record.epoch + 1,
            finished="cancelled" if record.running else record.finished,
            closed=True,
        )
        self.sessions[session_id] = Session(tombstone, self.now() + max(2 * self.lease_s, 60.0))

    def runs(self, session_id: str) -> bool:
        session = self.find(session_id)
        return session is not None and session.record.running and session.record.resumable > self.now()

    def lapsed(self, session_id: str) -> bool:
        session = self.find(session_id)
        return session is not None and session.record.running and session.record.resumable <= self.now()

    def claimed(self, tenant: str, key: str, fingerprint: bytes) -> str:
        held = self.claims.get((tenant, key))
        if held is None or held[2] <= self.now():
            return ""
        if held[0] != fingerprint:
            raise InvalidRequest("idempotency_key", "came with another request before")
        return held[1]

    def claim(self, tenant: str, key: str, fingerprint: bytes, session_id: str) -> str:
        if not (held := self.claimed(tenant, key, fingerprint)):
            held = session_id
            self.claims[tenant, key] = fingerprint, session_id, self.now() + self.ttl_s
        return held

    # What follows is for `Owned` and for looking inside.

    def find(self, session_id: str) -> Session | None:
        """A session or its tombstone; None once it expired."""
        session = self.sessions.get(session_id)
        return session if session is not None and session.expires > self.now() else None

    def lend(self, session: Session) -> None:
        ends = self.now() + self.lease_s
        resumable = ends + self.resume_ttl_s if session.record.running else 0.0
        session.record = replace(session.record, lease=ends, resumable=resumable)

    def touch(self, session: Session) -> None:
        session.expires = self.now() + self.ttl_s

    def _open(self, session_id: str) -> Session:
        session = self.find(session_id)
        if session is None or session.record.closed:
            raise NotFound(session_id)
        return session

    @staticmethod
    def _repeated(record: SessionRecord, expected: int, owner: str) -> bool:
        return record.epoch == expected + 1 and record.owner == owner


class Owned:
    """A session under one epoch of one owner, which counts `length` durable tokens."""

    def __init__(self, store: Store, session_id: str, epoch: int, owner: str, length: int) -> None:
        self.session_id, self.epoch, self.owner, self.length = session_id, epoch, owner, length
        self._store = store

    def append(
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
        session = self._owned(start)
        length, stop = session.record.length, start + len(tokens)
        if session.tokens[start:stop] != list(tokens[: length - start]):
            raise Conflict(self.session_id)
        if stop > length and not session.record.running:
            raise Conflict(self.session_id)
        self._renew(session)
        if stop >= length:
            session.record = replace(
                session.record,
                plan=session.record.plan if plan is None else plan,
                verifier=session.record.verifier if verifier is None else verifier,
                origin=session.record.origin if origin is None else origin,
                drafters=session.record.drafters if drafters is None else tuple(drafters),
            )
        if stop > length:
            each = len(logprobs) // len(tokens)
            session.tokens += tokens[length - start :]
            session.logprobs += [logprobs[i * each : (i + 1) * each] for i in range(length - start, len(tokens))]
            session.record = replace(session.record, length=stop, digest=digest)
        self.length = max(self.length, session.record.length)
        return session.record.length

    def renew(self) -> None:
        self._renew(self._owned(self.length))

    def release(self, usage: str) -> None:
        session = self._owned(self.length)
        self._store.touch(session)
        if session.record.lease == 0:
            return
        session.record = replace(session.record, lease=0.0, resumable=0.0)
        if session.record.running:
            resumable = self._store.now() + self._store.resume_ttl_s
            session.record = replace(session.record, usage=usage, resumable=resumable)

    def finish(self, reason: str, usage: str, kept: Sequence[int] | None = None) -> None:
        if kept is not None:
            self.length = len(kept)
        session = self._owned(self.length)
        self._store.touch(session)
        record = session.record
        if record.running:
            if kept is not None:
                session.tokens, session.logprobs, session.ends = [*kept], [b""] * len(kept), {}
                record = replace(record, length=len(kept), digest=extend(EMPTY, kept))
            session.ends[record.generation] = (record.length, reason)
            record = replace(record, finished=reason, usage=usage)
        session.record = replace(record, lease=0.0, resumable=0.0)

    def restore(self, record: SessionRecord, tokens: Sequence[int], logprobs: bytes) -> None:
        store, held = self._store, self._store.find(self.session_id)
        after = replace(
            record, epoch=self.epoch + 1, owner=self.owner, length=len(tokens), digest=extend(EMPTY, tokens)
        )
        if held is None:
            held = Session(SessionRecord(self.session_id, record.tenant, record.model, record.tokenizer_digest), 0.0)
        else:
            now = held.record
            if now.closed or now.epoch > self.epoch + 1 or (now.epoch >= self.epoch and now.owner != self.owner):
                raise Superseded(self.session_id)
            if now.generation > record.generation or list(tokens[: now.length]) != held.tokens:
                raise Conflict(self.session_id)
            if now.generation == record.generation:
                ended = now.finished and (now.finished, now.length) != (record.finished, len(tokens))
                if now.turn != record.turn or ended:
                    raise Conflict(self.session_id)
        same = ("epoch", "owner", "length", "generation", "finished")
        if any(getattr(held.record, name) != getattr(after, name) for name in same):
            assert record.turn is not None
            answer = record.turn.answer_position
            each = len(logprobs) // (len(tokens) - answer) if logprobs else 0
            for position in range(len(held.tokens), len(tokens)):
                at = (position - answer) * each
                held.tokens.append(tokens[position])
                held.logprobs.append(logprobs[at : at + each] if position >= answer else b"")
            held.record = replace(after, lease=0.0, resumable=0.0)
            if after.running:
                store.lend(held)
            else:
                held.ends[after.generation] = (after.length, after.finished)
            store.sessions[self.session_id] = held
            store.touch(held)
        self.epoch, self.length = after.epoch, after.length

    def _owned(self, length: int) -> Session:
        """The session, if it still has this owner and Redis has as many tokens as the owner counts."""
        session = self._store.find(self.session_id)
        if session is None:
            raise NotFound(self.session_id)
        record = session.record
        if record.closed or record.epoch > self.epoch or (record.epoch == self.epoch and record.owner != self.owner):
            raise Superseded(self.session_id)
        if record.epoch < self.epoch or record.length < length:
            raise Conflict(self.session_id)
        return session

    def _renew(self, session: Session) -> None:
        if session.record.lease != 0:
            self._store.lend(session)
        self._store.touch(session)
