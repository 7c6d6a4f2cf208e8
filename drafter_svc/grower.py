"""The drafter's loop over all its sessions: choose, forward, propose, send; one level a turn."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from drafter_svc.drawn import DrawnSession
from drafter_svc.headed import HeadDrawnSession, HeadRankedSession
from drafter_svc.news import News
from drafter_svc.ranked import RankedSession
from drafter_svc.refusals import LET_GO
from drafter_svc.relay import Below, NobodyBelow, Relay
from drafter_svc.replica import Snapshot, Update
from drafter_svc.session import DraftSession
from drafter_svc.upstream import Attachment
from outrider.core.construction import construction_of, shaped_of
from outrider.core.contract import Contract
from outrider.core.growth import CANDIDATES, Fits
from outrider.core.noise import Draw
from outrider.core.rules import Drawn, rule_of
from outrider.core.tree import Delta, Hints, Node
from outrider.engine.batch import Segment
from outrider.engine.engine import Engine
from outrider.engine.logits import Logits, rows_of
from outrider.engine.page_budget import PageBudget
from outrider.engine.passes import Passes
from outrider.engine.slots import Slots, Taken
from outrider.rpc.liveness import Progress

READ_ON = 1024  # tokens of long texts that all sessions together read on beside a pass; some two milliseconds
LEARNING = 0.1  # how far what a level takes follows one level


@dataclass(slots=True)
class Member:
    """A session in the loop, and what its upstream said since the last level."""

    place: Taken
    news: News = field(default_factory=News)
    session: DraftSession | None = None
    relay: Relay | None = None  # its other side, for a lower tier
    next: tuple[Segment, list[Node]] | None = None  # what to run for it next, and the nodes that this expands
    has_read: bool = False  # all of a long text, just now: there may be more to propose


@dataclass(frozen=True, slots=True)
class Turn:
    """One session's part of a level."""

    key: Attachment
    session: DraftSession
    segment: Segment
    nodes: list[Node]  # that its last rows expand


class Grower:
    """Owns the engine and the sessions.

    `send` takes new nodes, the version of the plan and whether that was all until the next commit; `resync` is asked
    for a snapshot when a copy drifted.

    Commits wait at most for the level that is running: they are applied before the next one is chosen.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        level_nodes: int,
        prefill_chunk: int,
        send: Callable[[Attachment, Delta, int, bool], None],
        resync: Callable[[Attachment], None],
        tree: str = "best-first",
        below: Below | None = None,
    ) -> None:
        """`tree`: how trees are constructed, by name; `below`: how a lower tier is told. Raises ConfigError when there
        is no such construction."""
        self._ranked, self._shaped = construction_of(tree), shaped_of(tree)
        self.members: dict[Attachment, Member] = {}
        self.sessions: dict[str, Relay] = {}  # as the lower tier finds them
        self.progress = Progress()
        self.slots = Slots(engine.slots)
        self.nodes = 0
        self.preempted = 0  # how often a session's KV was let go, for want of memory
        self._budget = PageBudget(engine, self.slots)
        self._engine = engine
        self._passes = Passes(engine)
        self._level_s = 0.0  # that a level takes, from the choice to the proposals
        self._level_nodes = level_nodes
        self._prefill_chunk = prefill_chunk
        self._send = send
        self._resync = resync
        self._below = below or NobodyBelow()
        self._fits: dict[tuple[str, str], Fits] = {}
        self._changed = asyncio.Event()
        self._agreed_before: dict[str, tuple[int, int]] = {}  # with other engines
        self._coming: Engine | None = None  # that replaces the present one before the next level

    def opened(self, key: Attachment, snapshot: Snapshot) -> None:
        """A session begins, or begins anew. Ignored when no slot is free."""
        member = self.members.get(key)
        if member is None:
            if not self.slots.free:
                return
            member = self.members[key] = Member(self._place(key, snapshot))
        self._note(key, member.news, snapshot)

    def updated(self, key: Attachment, update: Update | Hints) -> None:
        """A session's upstream committed tokens, changed the terms, or says what it believes."""
        member = self.members.get(key)
        if member is not None:
            self._note(key, member.news, update)

    def wake(self) -> None:
        """There is news from below."""
        self._changed.set()

    def met(self) -> None:
        """A drafter below has come. Nothing that was measured hangs on that."""

    def closed(self, key: Attachment) -> None:
        """A session is over. Its KV stays until memory is needed.

        A pass that runs writes behind the rows that count, so the slot may be taken at once.
        """
        member = self.members.pop(key, None)
        if member is not None:
            if member.relay is not None:
                del self.sessions[member.relay.id]
                member.relay.dismiss(LET_GO)
            self._give_back(key, member)
            self._changed.set()  # there may be memory for another one

    def _note(self, key: Attachment, news: News, latest: Snapshot | Update | Hints) -> None:
        """What comes while a pass runs waits for its end; of more than there can be, all is asked for anew."""
        if news.add(latest):
            self._changed.set()
        else:
            self._resync(key)

    def renew(self, engine: Engine) -> None:
        """Drafts with another engine of the same shape from the next level on. Sessions go on; their texts are read
        again."""
        self._coming = engine
        self._changed.set()

    def agreement(self) -> dict[str, tuple[int, int]]:
        """For each class of temperatures, at how many places the best candidate was the target's token, and of how
        many."""
        counts = dict(self._agreed_before)
        for (_, heat), fits in tuple(self._fits.items()):
            agreed, judged = counts.get(heat, (0, 0))
            counts[heat] = agreed + fits.agreed, judged + fits.judged
        return counts

    async def run(self) -> None:
        """Grows until cancelled."""
        try:
            while True:
                turns = await self._choose()
                began = time.monotonic()
                logits = await self._forward(turns)
                self._propose(turns, logits)
                if all(turn.nodes for turn in turns):
                    self._level_s += LEARNING * (time.monotonic() - began - self._level_s)
        finally:
            self._passes.close()

    async def _choose(self) -> list[Turn]:
        """Catches up with the upstreams; waits until there is something worth growing."""
        while True:
            self._changed.clear()
            self._take_engine()
            turns, chunk, hold = [], self._prefill_chunk, math.inf
            line = list(self.members.items())
            self._budget.open()
            for place, (key, member) in enumerate(line):
                if member.news or member.has_read or (member.relay is not None and member.relay.changed):
                    self._catch_up(key, member)
                if (left := self._patience(member)) > 0.0:
                    hold = min(hold, left)
                elif member.session is not None and member.next is not None:
                    segment, nodes = member.next
                    reads = len(segment.tokens) - len(nodes)
                    # A prompt's chunk must not wait for another session's.
                    if reads <= chunk and self._reserve(member.session, segment, line[place + 1 :]):
                        chunk -= reads
                        turns.append(Turn(key, member.session, segment, nodes))
            if turns:
                return turns
            if self._read_on():
                await asyncio.sleep(0)  # others have their turn
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(hold if hold < math.inf else None):
                    await self._passes.rest(self._changed)

    def _reserve(self, session: DraftSession, segment: Segment, behind: Sequence[tuple[Attachment, Member]]) -> bool:
        """Whether there is memory for what a session is to run next, and for all of its text, once that of those
        `behind` it has gone as far as need be: the first in line always drafts."""
        if not self._budget.bounded:
            return True
        self._passes.settle()
        end = max(segment.prefix + segment.span, len(session.tokens))
        return self._budget.reserve(session.slot, session.cached, end, self._preemptions(behind))

    def _preemptions(self, behind: Sequence[tuple[Attachment, Member]]) -> Iterator[Member]:
        """Lets the KV of one after the other go, from the last on; they read their texts again when there is room."""
        for _, member in reversed(behind):
            if member.session is not None and member.session.cached:
                self.preempted += 1
                self._forget(member)
                self.slots.computed(member.place.slot, 0)
                self._engine.release(member.place.slot, 0)
                yield member

    def _forget(self, member: Member) -> None:
        """Nothing of a session's KV is there any more; what it has drafted stays good at the upstream."""
        member.place, member.next = Taken(member.place.slot, 0, None), None
        if member.session is not None and not member.session.forget():
            member.news.appendleft(member.session.snapshot())

    def _read_on(self) -> bool:
        """Has sessions whose texts are long read on in them. Returns whether any did."""
        left = READ_ON
        for member in self.members.values():
            if left and member.session is not None and member.session.behind:
                left -= member.session.read_on(left)
                member.has_read = not member.session.behind
        return left < READ_ON

    def _take_engine(self) -> None:
        """No pass runs. A session's slot holds nothing of the new engine's."""
        if self._coming is None:
            return
        self._engine, self._coming = self._coming, None
        self._passes.renew(self._engine)
        self._agreed_before = self.agreement()
        self._fits.clear()  # what another model's scores were worth
        self.slots.forget()
        self._budget = PageBudget(self._engine, self.slots)
        for member in self.members.values():
            self._forget(member)

    def _patience(self, member: Member) -> float:
        """Seconds for which what is being drafted below is worth waiting for; a prompt is read at once."""
        if member.relay is None or member.next is None or not member.next[1]:
            return 0.0
        return member.relay.patience(time.monotonic(), self._level_s)

    def _catch_up(self, key: Attachment, member: Member) -> None:
        """Applies what the upstream said. A session with nothing left to draft says so at once."""
        self._apply_news(key, member)
        session, member.has_read = member.session, False
        if session is not None:
            if member.relay is not None:
                member.relay.changed = False
            delta = session.refill(self._fit(session.contract))
            member.next = self._next(member, session)
            if session.plan.depth:
                self._tell(key, member, session, delta)

    def _next(self, member: Member, session: DraftSession) -> tuple[Segment, list[Node]] | None:
        return session.next_segment(
            self._fit(session.contract),
            chunk=self._prefill_chunk,
            limit=max(self._level_nodes, session.plan.nodes if member.relay and member.relay.subscriptions else 0),
            context=self._engine.context,
            rows=self._engine.rows,
            level_s=self._level_s,
        )

    def _apply_news(self, key: Attachment, member: Member) -> None:
        while member.news:
            news = member.news.popleft()
            if isinstance(news, Snapshot):
                member.session = self._begin(key, member, news)
                if member.session.tree.digest == news.digest:
                    self._relay(key, member, member.session)
                    continue
            elif member.session is None or self._apply(member, member.session, news):
                continue
            member.session = member.next = None
            member.place = Taken(member.place.slot, 0, None)  # what it holds is not known any more
            self.slots.computed(member.place.slot, 0)
            member.news.clear()
            self._resync(key)

    def _begin(self, key: Attachment, member: Member, snapshot: Snapshot) -> DraftSession:
        """The session over what the upstream says, which may be less than it was; KV that is still good is kept."""
        first_id, repeats = 1, None
        if member.session is not None:
            first_id = member.session.next_id
            repeats = member.session.repeats if isinstance(member.session, RankedSession) else None
            self._give_back(key, member)
            member.place = self._place(key, snapshot)
        place, vocabulary = member.place, self._engine.sayable
        if snapshot.features is not None:
            first = len(snapshot.tokens) - len(snapshot.features)
            self._passes.later(partial(self._engine.feed, place.slot, first, snapshot.features, anew=True))
        if rule_of(snapshot.contract).drawn is Drawn.SAMPLED:
            drawn = HeadDrawnSession if self._engine.fed else DrawnSession
            return drawn(snapshot, place.slot, vocabulary, self._shaped, first_id=first_id, cached=place.cached)
        ranked = HeadRankedSession if self._engine.fed else RankedSession
        return ranked(
            snapshot, place.slot, vocabulary, self._ranked, first_id=first_id, cached=place.cached, repeats=repeats
        )

    def _place(self, key: Attachment, snapshot: Snapshot) -> Taken:
        place = self.slots.take(snapshot.tokens, key.tenant, key.session_id)
        self._passes.fill(place)
        return place

    def _give_back(self, key: Attachment, member: Member) -> None:
        held = member.session.tokens[: member.session.cached] if member.session else []
        self.slots.give_back(member.place.slot, held, key.tenant, key.session_id)
        self._passes.release(member.place.slot, len(held))

    def _relay(self, key: Attachment, member: Member, session: DraftSession) -> None:
        """Has the lower tier find the session."""
        if member.relay is not None:
            member.relay.renew(session)
            return
        member.relay = Relay(key, session, self._below, partial(self._forward_up, key, member))
        self.sessions[key.session_id] = member.relay
        self._below.welcome_waiting(member.relay)

    def _forward_up(self, key: Attachment, member: Member, nodes: Sequence[Node], origin: str, span: bytes) -> None:
        """Sends on what came from below, at once, with what this model thinks of it, if it knows."""
        session = member.session
        if session is not None and nodes:
            session.judge(nodes, self._fit(session.contract))
            self._deliver(key, session, session.announce(nodes, origin, span), exhausted=False)

    def _apply(self, member: Member, session: DraftSession, news: Update | Hints) -> bool:
        """False when the copy turns out to be another one than the upstream's."""
        if isinstance(news, Hints):
            session.tree.hint(news)
            return True
        update, relay = news, member.relay
        if update.position != len(session.tokens):
            return False
        if update.tokens:
            if relay is not None:
                relay.learn_from(update.tokens)
            move = session.commit(update.tokens)
            if move is not None:
                self._passes.move(session.slot, move.source, move.target)
            if update.features is not None:
                self._passes.later(
                    partial(self._engine.feed, session.slot, update.position, update.features, anew=False)
                )
        dropped = session.obey(update)
        if session.tree.digest != update.digest:
            return False
        if relay is not None:
            self._below.drop(relay.owners(dropped))
            relay.publish(update.position, update.tokens, time.monotonic())
        return True

    async def _forward(self, turns: Sequence[Turn]) -> Logits:
        """The packed pass; noise, lessons and long texts are dealt with meanwhile."""
        draws = [turn.session.draw if self._engine.draws else None for turn in turns]
        segments, prepare = [turn.segment for turn in turns], partial(self._prepare, turns, draws)
        self.progress.begin()
        logits = await self._passes.judge(segments, draws, prepare, CANDIDATES)
        self.progress.end()
        return logits

    def _prepare(self, turns: Sequence[Turn], draws: Sequence[Draw | None]) -> None:
        for turn, draw in zip(turns, draws, strict=True):
            for node in turn.nodes if draw is None else ():
                turn.session.sampler.prepare(node.position + 1)
            turn.session.learn(self._fit(turn.session.contract))
        self._read_on()

    def _propose(self, turns: Sequence[Turn], logits: Logits) -> None:
        first = 0
        for turn in turns:
            rows = rows_of(logits, first, len(turn.nodes))
            first += len(rows)
            member = self.members.get(turn.key)
            if member is None or member.session is not turn.session:
                continue  # it ended while the pass ran
            turn.session.advance(turn.segment, turn.nodes)
            self.slots.computed(turn.session.slot, turn.session.cached)
            delta = turn.session.expand(turn.nodes, rows, self._fit(turn.session.contract))
            if member.relay is not None and turn.nodes:
                member.relay.hint(time.monotonic())
            member.next = self._next(member, turn.session)
            self._tell(turn.key, member, turn.session, delta)

    def _tell(self, key: Attachment, member: Member, session: DraftSession, delta: Delta) -> None:
        """Sends what is new; when that was all until the next commit, also what was held back until then."""
        exhausted = member.next is None and not (member.relay is not None and member.relay.drafting)
        if exhausted:
            rest = session.rest(self._fit(session.contract))
            if rest.tokens:
                self._deliver(key, session, delta, exhausted=False)
                delta = rest
        self._deliver(key, session, delta, exhausted=exhausted)

    def _deliver(self, key: Attachment, session: DraftSession, delta: Delta, *, exhausted: bool) -> None:
        self.nodes += len(delta.tokens)
        if delta.tokens or delta.rescored or exhausted:
            self._send(key, delta, session.plan.version, exhausted)

    def _fit(self, contract: Contract) -> Fits:
        """Scores are fitted per rule and class of temperature."""
        return self._fits.setdefault((contract.rule, contract.heat), Fits())
