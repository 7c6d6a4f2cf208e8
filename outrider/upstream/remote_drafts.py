"""Drafters for an engine that is not ours: tokens in, chains of drafts out, one call a step.

    with RemoteDrafts(UpstreamSettings(drafters=["10.0.0.5:7072"], model=Path("models/target"))) as drafts:
        drafts.open("request-1", prompt, Contract(seed=7, max_tokens=2**31 - 1, temperature=1.0))
        [chain] = drafts.step([("request-1", [])])
        ...  # the engine verifies the chain, and chooses its tokens
        [chain] = drafts.step([("request-1", chosen)])
        drafts.close("request-1")

The engine never waits for the network: a thread of its own serves the drafters, and a step reads what they have
sent by then, or waits for it as long as the engine allows. A call never raises: where something fails there are no
drafts.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import NamedTuple, Self

from outrider.core.control.arms.steering import SessionTokens
from outrider.core.control.holds.arrival_model import Arrivals
from outrider.core.control.holds.hold_policy import HoldPolicy
from outrider.core.session.contract import Contract, Plan, PlanOverlap
from outrider.core.session.speculation_status import SpeculationReason
from outrider.engine.checkpoints.checkpoint import read_config, read_tokenizer_digest
from outrider.rpc import liveness
from outrider.rpc.server import serving
from outrider.rpc.tls import Tls
from outrider.upstream.drafter_links import LOOK_S, DrafterLinks, RegisteredDrafters
from outrider.upstream.foreign_session import NONE, DraftChain, ForeignSession, Row, RowTerms
from outrider.upstream.own_tickets import OwnTickets
from outrider.upstream.servicer import UpstreamServicer
from outrider.upstream.step_control import ChosenDrafts, EngineStep, StepControl

START_S = 10.0  # time to begin to listen
MOST_SESSIONS = 1024

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UpstreamSettings:
    """What an engine needs for its drafts."""

    drafters: Sequence[str]  # "HOST:PORT" of each, beside those that `redis` has
    model: Path  # the checkpoint that the engine serves: its tokenizer and vocabulary
    vocabulary: int | None = None  # ids that the engine chooses from; None: the checkpoint's
    depth: int = 4  # the longest chain
    ahead: int = 4  # levels that are drafted beyond it, while the engine verifies
    width: int = 2  # children of a node
    wait_ms: float | None = None  # the longest that a step waits for drafts; None: as long as it pays, if `adaptive`
    each: int = 1  # drafters of a session
    adaptive: bool = True  # draft only as far as measured times show that it pays
    redis: str | None = None  # URL of a Redis in which drafters announce themselves
    idle_s: float = 60.0  # a row that no step names for this time has ended
    listen: str = "127.0.0.1:0"  # where drafters connect to
    advertise: str | None = None  # the address as drafters know it; None: `listen`
    tls: Tls | None = field(default=None, repr=False)  # certificates of the role upstream

    @property
    def plan(self) -> Plan:
        """The ceilings that drafters get."""
        depth = self.depth + self.ahead
        overlap = PlanOverlap.MEASURED if self.adaptive else PlanOverlap.ALWAYS
        return Plan(1, depth=depth, width=self.width, nodes=64, wait_us=0, overlap=overlap)


@dataclass(slots=True)
class UpstreamCounts:
    """What the steps so far had."""

    steps: int = 0
    rows: int = 0  # of all steps
    tokens: int = 0  # tokens that the engine chose
    drafted: int = 0  # tokens of chains
    accepted: int = 0  # those that the engine chose, too
    seconds: float = 0.0  # within `step`
    tried: Counter[int] = field(default_factory=Counter)  # passes over a row, by the drafts that they verified
    reached: Counter[int] = field(default_factory=Counter)  # these passes, by the drafts that they accepted
    reasons: Counter[SpeculationReason] = field(default_factory=Counter)  # rows of all steps, by what they verified


class RemoteDrafts:
    """The drafts of an engine's rows. One thread of the engine calls it."""

    def __init__(self, settings: UpstreamSettings) -> None:
        """Begin to listen for drafters. Raises CheckpointError for a model without a tokenizer, and ConfigError for an
        address that cannot be bound."""
        self.settings = settings
        self.counts = UpstreamCounts()
        self._rows: dict[str, Row] = {}
        self._fresh = threading.Event()  # set when some drafts have changed
        self._began = 0.0  # when the last step began; 0: none has
        self._computed = 0  # tokens of the pass since then, without what it read of prompts
        self._held = 0.0  # seconds that it waited for drafts
        self._holds = HoldPolicy()
        self._min_path_score = 0.0  # path score below which no draft was worth its verification
        self._failed = False
        digest = read_tokenizer_digest(settings.model)
        vocabulary = settings.vocabulary or read_config(settings.model).vocabulary
        self._host = _Host(settings, digest, vocabulary, self._fresh)
        self._thread = threading.Thread(target=self._host.run, name="outrider-drafts", daemon=True)
        self._thread.start()
        self._host.started.result(START_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def name(self) -> str:
        """What drafters know this upstream by."""
        return self._host.name

    @property
    def links(self) -> DrafterLinks:
        """The drafters that are known."""
        return self._host.links

    @property
    def drafters(self) -> int:
        """Drafters that answer and may draft."""
        return self.links.usable

    @property
    def rows(self) -> list[Row]:
        """Rows that are open."""
        return [row for row in tuple(self._rows.values()) if not row.ended]

    @property
    def control(self) -> StepControl:
        """What decides how far drafts pay."""
        return self._host.control

    def length(self, row: str) -> int:
        """Return how many tokens of a row's text are known here; 0 if it is not open."""
        return found.length if (found := self._row(row)) is not None else 0

    def open(
        self,
        row: str,
        tokens: Sequence[int],
        contract: Contract,
        *,
        prompt: int | None = None,
        accepts_at_random: bool = False,
    ) -> None:
        """Begin to draft for a row of the engine, whose text so far is `tokens`, of which the first `prompt` are the
        prompt; None: all.

        `contract`: how the engine chooses its tokens. `accepts_at_random`: it does not follow the contract, but accepts
        drafts with their probability (Leviathan et al. 2023), so that far fewer are right; the contract is only how
        drafters choose them. A row that is open begins anew.
        """
        try:
            self.close(row)
            if len(self._rows) >= MOST_SESSIONS:
                self._rows = {name: row for name, row in self._rows.items() if not row.ended}
            if not tokens or len(self._rows) >= MOST_SESSIONS:
                return
            text = [*tokens]  # the engine may write on in its own
            terms = RowTerms(contract, len(text) if prompt is None else prompt, accepts_at_random)
            opened = self._rows[row] = Row(row, len(text), Arrivals(self._holds.patterns(greedy=terms.greedy)))
            self._send(lambda: self._host.open(opened, text, terms))
        except Exception:
            self._note()

    def step(
        self,
        rows: Sequence[tuple[str, Sequence[int]]],
        most: Sequence[int] | None = None,
        *,
        read: int = 0,
        idle: bool = False,
    ) -> list[list[int]]:
        """Take the tokens that the engine has chosen since the last step, by row, and return each row's next chain.

        A row that is not open has none. `most`: the longest chain of each row, where that is below `depth`. `read`:
        prompt tokens that the engine read since the last step. `idle`: it had nothing to do for a while since then.
        """
        began = time.perf_counter()
        try:
            found = self._step(rows, [self.settings.depth] * len(rows) if most is None else most, read, idle=idle)
        except Exception:
            self._note()
            found = [[] for _ in rows]
        self.counts.seconds += time.perf_counter() - began
        return found

    def close(self, row: str) -> None:
        """Stop drafting for a row: its text is complete, or the engine has put it aside."""
        if (found := self._rows.pop(row, None)) is not None:
            self._send(lambda: self._host.close(found))

    def stop(self) -> None:
        """Stop drafting for all rows, and release the drafters."""
        self._rows.clear()
        self._host.inbox.put(None)
        self._thread.join(START_S)

    def _step(
        self, rows: Sequence[tuple[str, Sequence[int]]], most: Sequence[int], read: int, *, idle: bool
    ) -> list[list[int]]:
        counts, now = self.counts, time.monotonic()
        counts.steps += 1
        counts.rows += len(rows)
        computed, self._computed = self._computed + read, len(rows)
        began, self._began = self._began, now
        news, given, accepted = list[RowNews](), list[int](), list[int]()
        served, offers = list[Row | None](), list[DraftChain]()
        for (name, tokens), limit in zip(rows, most, strict=True):
            row = self._row(name)
            if row is not None:
                row.named = now
                if tokens:
                    new = [*tokens]
                    given.append(len(row.given.tokens))
                    accepted.append(row.commit(new))
                    news.append(RowNews(row, new, row.expected))
            served.append(row)
            offers.append(NONE if row is None else row.offer(limit))
        counts.tried.update(given)
        counts.reached.update(accepted)
        counts.tokens += sum(len(it.tokens) for it in news)
        counts.accepted += sum(accepted)
        held, self._held = self._held, 0.0
        step = None if idle or not began else EngineStep(computed, len(rows), read, now - began, held)
        if news or step is not None:  # before a wait, and after the rest: the other thread begins at once, and would
            self._fresh.clear()  # have the interpreter for milliseconds
            self._send(lambda: self._host.commit(news, step, self._min_path_score))
        if self.drafters and (self.settings.adaptive or self.settings.wait_ms):
            offers = self._wait(served, most, offers, now)
            self._held = time.monotonic() - now
        return self._take(served, offers)

    def _row(self, name: str) -> Row | None:
        """Return the row of that name, if it is open."""
        row = self._rows.get(name)
        if row is not None and row.ended:
            del self._rows[name]
            return None
        return row

    def _wait(
        self, rows: Sequence[Row | None], most: Sequence[int], offers: list[DraftChain], began: float
    ) -> list[DraftChain]:
        """Return the offers once none gets longer, or to wait on does not pay."""
        begun = False
        while awaited := [
            (row, offer)
            for row, offer, limit in zip(rows, offers, most, strict=True)
            if row is not None and row.awaits(offer, limit)
        ]:
            for row, offer in awaited:
                row.note_drafts(offer, None if begun else began)
            begun = True
            left = self._seconds_left([row for row, _ in awaited], offers, began)
            if left <= 0.0:
                break
            if not self._fresh.wait(left):
                for row, _ in awaited:
                    row.arrivals.give_up(time.monotonic())
                break
            self._fresh.clear()
            offers = [NONE if row is None else row.offer(limit) for row, limit in zip(rows, most, strict=True)]
        return offers

    def _seconds_left(self, awaited: Sequence[Row], offers: Sequence[DraftChain], began: float) -> float:
        """Return how long to wait for the next drafts of these rows."""
        now, longest = time.monotonic(), self.settings.wait_ms
        left = math.inf if longest is None else began + longest / 1000 - now
        if not self.settings.adaptive:
            return left
        return min(left, self._host.control.hold_seconds([row.arrivals for row in awaited], offers, now))

    def _take(self, rows: Sequence[Row | None], offers: Sequence[DraftChain]) -> list[list[int]]:
        """Return what the next pass verifies of the offers."""
        if self.settings.adaptive:
            choice = self._host.control.choose(offers, self._held)
        else:
            choice = ChosenDrafts([len(it.tokens) for it in offers], [1.0] * len(offers), 0.0)
        self._min_path_score = choice.min_path_score
        late = SpeculationReason.LATE if self.drafters else SpeculationReason.NO_DRAFTER
        found, why = [], list[SpeculationReason]()
        for row, offer, count, expected in zip(rows, offers, choice.taken, choice.expected, strict=True):
            if row is not None:
                row.give(offer, count, expected, late)
                why.append(row.reason)
            found.append([*offer.tokens[:count]])
        drafted = sum(choice.taken)
        self.counts.drafted += drafted
        self.counts.reasons.update(why)
        self._computed += drafted
        return found

    def _send(self, work: Callable[[], None]) -> None:
        """Have work done by the event loop's thread, in order."""
        self._host.inbox.put(work)

    def _note(self) -> None:
        if not self._failed:
            self._failed = True
            log.exception("drafts fail, so the engine goes on without; this is said once")


class RowNews(NamedTuple):
    """What the engine has chosen for a row."""

    row: Row
    tokens: list[int]
    expected: float  # tokens, by the chances of the drafts that it was given


class _Host:
    """The owner of the sessions, in the thread of its event loop."""

    def __init__(
        self, settings: UpstreamSettings, tokenizer_digest: bytes, vocabulary: int, fresh: threading.Event
    ) -> None:
        self.sessions: dict[str, ForeignSession] = {}
        self._of_rows: dict[Row, ForeignSession] = {}
        self.control = StepControl()
        self.progress = liveness.WorkClock()
        self.loop = asyncio.new_event_loop()
        self.started = Future[None]()
        self.inbox = SimpleQueue[Callable[[], None] | None]()  # None: the end
        self._settings = settings
        self._vocabulary = vocabulary
        self._fresh = fresh
        self._changed: dict[ForeignSession, None] = {}  # sessions whose drafts are to be published
        self.name = f"upstream-{secrets.token_hex(4)}"
        self._registered = RegisteredDrafters(settings.redis) if settings.redis else None
        tickets = OwnTickets()
        self._sink = UpstreamServicer(self.name, tokenizer_digest, tickets)
        self._sink.serve(self)
        self.links = DrafterLinks(
            self._addresses, tickets, self.name, tokenizer_digest, each=settings.each, tls=settings.tls
        )

    async def _addresses(self) -> list[str]:
        """Return the addresses of all drafters that are known now."""
        return [*self._settings.drafters, *(await self._registered() if self._registered else ())]

    def run(self) -> None:
        """Serve until the inbox has its end."""
        with suppress(OSError):  # an engine binds its process to the processors of its model
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        asyncio.set_event_loop(self.loop)
        main = self.loop.create_task(self._serve())
        threading.Thread(target=self._hand_over, args=(main,), name="outrider-inbox", daemon=True).start()
        try:
            self.loop.run_until_complete(main)
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            if self.started.done():
                log.exception("drafts have ended; the engine goes on without")
            else:
                self.started.set_exception(error)
        finally:
            self.loop.close()

    def _hand_over(self, main: asyncio.Task[None]) -> None:
        """Hand the engine's work to the event loop. Waking a loop writes to a socket, for which a thread gives the
        interpreter away: the engine's would get it back milliseconds later.
        """
        with suppress(RuntimeError):  # the loop has ended
            while (work := self.inbox.get()) is not None:
                self.loop.call_soon_threadsafe(work)
            self.loop.call_soon_threadsafe(main.cancel)

    async def _serve(self) -> None:
        async with serving(
            self._settings.listen,
            lambda server: [self._sink.register(server)],
            tls=self._settings.tls,
            begin_drain=self._sink.begin_drain,
        ) as address:
            self.started.set_result(None)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self.links.run(self._settings.advertise or address, self.sessions))
                    group.create_task(self._close_idle())
            finally:
                if self._registered is not None:
                    await self._registered.close()

    async def _close_idle(self) -> None:
        """Close rows that no step has named for too long: the engine may have forgotten them, or rest itself."""
        while True:
            await asyncio.sleep(min(LOOK_S, self._settings.idle_s))
            before = time.monotonic() - self._settings.idle_s
            for row in [row for row in self._of_rows if row.named < before]:
                row.ended = True
                self.close(row)

    def open(self, row: Row, tokens: list[int], terms: RowTerms) -> None:
        """Have drafters attached to a new session."""
        name, plan = f"{self.name}/{secrets.token_hex(8)}", self._settings.plan
        session = ForeignSession(name, tokens, terms, plan, self._vocabulary, row, self._on_news)
        self.sessions[session.id] = self._of_rows[row] = session
        self.control.on_opened(self.sessions.values())
        self._sink.subscribe_waiting(session)
        self.links.wake()

    def close(self, row: Row) -> None:
        """Dismiss the drafters of a session."""
        if (session := self._of_rows.pop(row, None)) is not None:
            del self.sessions[session.id]
            session.end()
            self.links.wake()

    def commit(self, news: Sequence[RowNews], step: EngineStep | None, min_path_score: float) -> None:
        """Take the tokens of a step, learn from it, and send the tokens to the drafters."""
        self.progress.end()
        known = [(session, it) for it in news if (session := self._of_rows.get(it.row)) is not None]
        before = [session.commit(it.tokens) for session, it in known]
        if self._settings.adaptive:
            made = [SessionTokens(session, len(it.tokens), it.expected) for session, it in known]
            self.control.on_step(self.sessions.values(), made, step)
        for (session, it), position in zip(known, before, strict=True):
            session.terms.verified_min_path_score = min_path_score
            self._sink.sender.publish(session, position, it.tokens)
            self._on_news(session)

    def wake(self) -> None:
        """Nothing waits: steps read what has been published."""

    def on_drafter_connected(self, drafter_id: str) -> None:
        """Its sessions subscribe by themselves."""

    def _on_news(self, session: ForeignSession) -> None:
        if not self._changed:
            self.loop.call_soon(self._publish)
        self._changed[session] = None

    def _publish(self) -> None:
        for session in self._changed:
            session.publish()
        self._changed.clear()
        self._fresh.set()
