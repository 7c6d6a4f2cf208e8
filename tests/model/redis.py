"""The log behind a network: every call takes its time, may lose its reply, may happen late, and is watched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from outrider.core.session.contract import OFF, Plan
from outrider.errors import Conflict, NotFound, OutriderError, Unavailable
from outrider.store.log_recovery import restored_record
from outrider.store.records import SessionLog, SessionRecord, SessionTurn
from tests.model.loop import Clock, HandLoop
from tests.store import reference

TTL_S, LEASE_S, RESUME_TTL_S = 1e6, 5.0, 60.0
Outcome = Literal["done", "lost", "refused", "late"]
ResultT = TypeVar("ResultT")


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(eq=False, slots=True)
class Request:
    """One call on its way."""

    what: str
    session_id: str
    operation: Callable[[], Any]
    reply: asyncio.Future[Any]
    loop: HandLoop
    epoch: int = 0  # of the owner that calls; 0: any
    owner: str = ""

    def __str__(self) -> str:
        return f"{self.what} {self.session_id} {self.epoch or ''} {self.owner}"


@dataclass
class _Saved:
    store: object
    owners: dict[str, tuple[int, str]]
    texts: dict[str, list[int]]


@dataclass
class Redis:
    """The store, the calls to it, and what it has confirmed."""

    clock: Clock
    kind: type[reference.Store] = reference.Store
    requests: list[Request] = field(default_factory=list)
    late: list[Request] = field(default_factory=list)  # given up by their callers; they may still happen
    away: bool = False
    owners: dict[str, tuple[int, str]] = field(default_factory=dict)  # the rightful owner of each session
    texts: dict[str, list[int]] = field(default_factory=dict)  # the log of each session as last seen
    longest: dict[str, list[int]] = field(default_factory=dict)  # and the most that was ever durable
    lost: dict[str, str] = field(default_factory=dict)  # sessions that lost something, and the owner to put it back
    hurt: set[str] = field(default_factory=set)  # sessions that ever lost something
    _saved: _Saved | None = None

    def __post_init__(self) -> None:
        self.store = self.kind(ttl_s=TTL_S, lease_s=LEASE_S, resume_ttl_s=RESUME_TTL_S, now=lambda: self.clock.now)

    def answer(self, request: Request, outcome: Outcome = "done") -> None:
        """A call gets there and back, or not."""
        self.requests.remove(request)
        if self.away:
            outcome = "refused"
        result: Any = None
        error: OutriderError | None = Unavailable("Redis cannot be reached")
        if outcome in ("done", "lost"):
            try:
                result, failure = self.run(request), None
            except OutriderError as raised:
                failure = raised
            if outcome == "done":
                error = failure
        elif outcome == "late" and not self.away:
            self.late.append(request)
        if not request.reply.done():
            if error is None:
                request.reply.set_result(result)
            else:
                request.reply.set_exception(error)
            request.loop.settle()

    def run_late(self, request: Request) -> None:
        """A call whose caller has given up gets there after all."""
        self.late.remove(request)
        with suppress(OutriderError):
            self.run(request)

    def save(self) -> None:
        """This much is on disk."""
        self._saved = _Saved(
            self.store.saved(), dict(self.owners), {name: [*text] for name, text in self.texts.items()}
        )

    @property
    def can_lose(self) -> bool:
        """Whether there is something on disk to go back to."""
        return self._saved is not None

    def lose(self, alive: Mapping[str, str]) -> None:
        """Goes back to what is on disk. `alive`: sessions whose living owner has more, and the owner's name."""
        saved, self._saved = self._saved, None
        assert saved is not None
        before = {name: session.record for name, session in self.store.sessions.items()}
        self.store.lose(saved.store)
        after = {name: session.record for name, session in self.store.sessions.items()}
        for name, record in before.items():
            if after.get(name) != record:
                self.lost[name] = alive.get(name, "") if self.lost.get(name, "?") else ""
        self.hurt.update(self.lost)
        self.owners, self.texts = saved.owners, saved.texts

    def run(self, request: Request) -> Any:
        """The call happens; what it did is held against the rules."""
        before = len(self.texts.get(request.session_id, ()))
        name = request.session_id
        was = self.store.sessions[name].record if name in self.store.sessions else None
        result = request.operation()
        session = self.store.sessions.get(name)
        if session is None:
            return result
        record, text = session.record, session.tokens
        if request.what in ("begin", "acquire", "restore"):
            self._own(name, record)
        ours = record.owner == self.lost.get(name)
        if name in self.lost and (request.what in ("begin", "acquire") or not ours) and record != was:
            self.lost[name] = ""  # another owner went on with fewer tokens before this one noticed
        elif request.what == "restore" and self.lost.get(name) and len(text) >= len(self.longest.get(name, ())):
            del self.lost[name]
        if request.epoch and len(text) > before:
            owner = (request.epoch, request.owner) if request.what == "append" else (record.epoch, record.owner)
            if owner != self.owners[name]:
                raise Violation(f"{request.what} by {owner}, but {self.owners[name]} owns session {name}")
        known = self.texts.get(name, [])
        if text[: len(known)] != known:
            raise Violation(f"session {name}: durable tokens changed from {known} to {text}")
        self.texts[name] = [*text]
        longest = self.longest.get(name, [])
        if text[: len(longest)] != longest[: len(text)] and name not in self.lost:
            raise Violation(f"session {name}: {longest} was durable, and it is {text} now")
        if len(text) >= len(longest) or text != longest[: len(text)]:
            self.longest[name] = [*text]
        return result

    def _own(self, name: str, record: SessionRecord) -> None:
        ours, theirs = (record.epoch, record.owner), self.owners.get(name, (0, ""))
        if ours[0] < theirs[0] or (ours[0] == theirs[0] and ours[1] != theirs[1]):
            raise Violation(f"session {name} went from {theirs} to {ours}")
        self.owners[name] = ours


class Sessions:
    """What a router has for `outrider.store.sessions.Sessions`."""

    def __init__(self, redis: Redis, loop: HandLoop) -> None:
        self.redis = redis
        self._loop = loop

    async def ask(
        self, what: str, session_id: str, operation: Callable[[], ResultT], owned: Owned | None = None
    ) -> ResultT:
        """Sends one call and waits for its reply. Raises as the operation does, and Unavailable."""
        request = Request(what, session_id, operation, self._loop.create_future(), self._loop)
        if owned is not None:
            request.epoch, request.owner = owned.epoch, owned.owner
        self.redis.requests.append(request)
        result: ResultT = await request.reply
        return result

    async def create(self, session_id: str, *what: Any) -> bool:
        return await self.ask("create", session_id, lambda: self.redis.store.create(session_id, *what))

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
    ) -> Owned:
        arguments = (session_id, expected, owner, turn, start, [*tokens], digest)
        owned = await self.ask(
            "begin", session_id, lambda: self.redis.store.begin(*arguments, plan=plan, verifier=verifier)
        )
        return Owned(self, session_id, owned.epoch, owner, owned.length)

    async def acquire(self, session_id: str, expected: int, owner: str) -> Owned:
        owned = await self.ask("acquire", session_id, lambda: self.redis.store.acquire(session_id, expected, owner))
        return Owned(self, session_id, owned.epoch, owner, owned.length)

    async def get(self, session_id: str, tenant: str | None = None) -> SessionRecord:
        return await self.ask("get", session_id, lambda: self.redis.store.get(session_id, tenant))

    async def read(self, session_id: str, start: int = 0) -> SessionLog:
        return await self.ask("read", session_id, lambda: self.redis.store.read(session_id, start))

    async def runs(self, session_id: str) -> bool:
        return await self.ask("runs", session_id, lambda: self.redis.store.runs(session_id))

    async def lapsed(self, session_id: str) -> bool:
        return await self.ask("lapsed", session_id, lambda: self.redis.store.lapsed(session_id))

    async def claimed(self, tenant: str, key: str, fingerprint: bytes) -> str:
        return await self.ask("claimed", "", lambda: self.redis.store.claimed(tenant, key, fingerprint))

    async def claim(self, tenant: str, key: str, fingerprint: bytes, place: str) -> str:
        return await self.ask("claim", "", lambda: self.redis.store.claim(tenant, key, fingerprint, place))


class Owned:
    """What a router has for `outrider.store.sessions.OwnedSession`. What is sent is fixed when it is sent."""

    def __init__(self, sessions: Sessions, session_id: str, epoch: int, owner: str, length: int) -> None:
        self.session_id, self.epoch, self.owner = session_id, epoch, owner
        self._sessions = sessions
        self._length = length
        self._turns = asyncio.Lock()

    async def append(self, start: int, tokens: Sequence[int], digest: int, **changes: Any) -> int:
        async with self._turns:
            owned, sent = self._now(), [*tokens]
            length = await self._ask("append", lambda: owned.append(start, sent, digest, **changes))
            self._length = max(self._length, length)
        return length

    async def renew(self) -> None:
        async with self._turns:
            await self._ask("renew", self._now().renew)

    async def release(self, usage: str) -> None:
        async with self._turns:
            owned = self._now()
            await self._ask("release", lambda: owned.release(usage))

    async def finish(self, reason: str, usage: str, kept: Sequence[int] | None = None) -> None:
        async with self._turns:
            owned = self._now()
            await self._ask("finish", lambda: owned.finish(reason, usage, kept))

    async def restore(self, record: SessionRecord, tokens: Sequence[int], logprobs: bytes) -> None:
        """A look and a compare-and-set, as the real one does it."""
        text = [*tokens]
        async with self._turns:
            for _ in range(4):
                try:
                    seen = await self._sessions.get(self.session_id)
                except NotFound:
                    seen = None
                after = restored_record(seen, record, self.epoch, self.owner, text)
                owned = self._now()

                def swap(
                    seen: SessionRecord | None = seen, after: SessionRecord = after, owned: reference.Owned = owned
                ) -> bool:
                    held = self._sessions.redis.store.find(self.session_id)
                    if _look(held.record if held else None) not in (_look(seen), _look(after)):
                        return False
                    owned.restore(record, text, logprobs)
                    return True

                if await self._ask("restore", swap):
                    self.epoch, self._length = after.epoch, after.length
                    return
            raise Conflict("it changes while it is being restored")

    def _now(self) -> reference.Owned:
        store = self._sessions.redis.store
        return reference.Owned(store, self.session_id, self.epoch, self.owner, self._length)

    async def _ask(self, what: str, operation: Callable[[], ResultT]) -> ResultT:
        return await self._sessions.ask(what, self.session_id, operation, self)


def _look(record: SessionRecord | None) -> tuple[Any, ...]:
    if record is None:
        return ()
    return record.epoch, record.owner, record.length, record.digest, record.generation, record.finished
