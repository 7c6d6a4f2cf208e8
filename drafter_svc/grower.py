"""The drafter's loop over all its sessions: choose, forward, propose, send; one level a turn."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from drafter_svc.drawn import DrawnSession
from drafter_svc.ranked import RankedSession
from drafter_svc.replica import Snapshot, Update
from drafter_svc.session import DraftSession
from drafter_svc.upstream import Attachment
from outrider.core.construction import construction_of, shaped_of
from outrider.core.contract import Contract
from outrider.core.growth import Fits
from outrider.core.rules import Drawn, rule_of
from outrider.core.tree import Delta, Node
from outrider.engine.batch import Segment
from outrider.engine.native import Engine
from outrider.engine.passes import Passes
from outrider.engine.slots import Slots, Taken
from outrider.rpc.liveness import Progress

LEARNING = 0.1  # how far what a level takes follows one level


@dataclass(slots=True)
class Member:
    """A session in the loop, and what its upstream said since the last level."""

    place: Taken
    news: deque[Snapshot | Update] = field(default_factory=deque)
    session: DraftSession | None = None
    next: tuple[Segment, list[Node]] | None = None  # what to run for it next, and the nodes that this expands


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
    ) -> None:
        """`tree`: how trees are constructed, by name. Raises ConfigError when there is no such construction."""
        self._ranked, self._shaped = construction_of(tree), shaped_of(tree)
        self.members: dict[Attachment, Member] = {}
        self.progress = Progress()
        self.slots = Slots(engine.slots)
        self.nodes = 0
        self._engine = engine
        self._passes = Passes(engine)
        self._level_s = 0.0  # that a level takes, from the choice to the proposals
        self._level_nodes = level_nodes
        self._prefill_chunk = prefill_chunk
        self._send = send
        self._resync = resync
        self._fits: dict[tuple[str, str], Fits] = {}
        self._changed = asyncio.Event()

    def opened(self, key: Attachment, snapshot: Snapshot) -> None:
        """A session begins, or begins anew. Ignored when no slot is free."""
        member = self.members.get(key)
        if member is None:
            if not self.slots.free:
                return
            member = self.members[key] = Member(self._place(key, snapshot))
        member.news.append(snapshot)
        self._changed.set()

    def updated(self, key: Attachment, update: Update) -> None:
        """A session's upstream committed tokens or changed the terms."""
        member = self.members.get(key)
        if member is not None:
            member.news.append(update)
            self._changed.set()

    def closed(self, key: Attachment) -> None:
        """A session is over. Its KV stays until memory is needed.

        A pass that runs writes behind the rows that count, so the slot may be taken at once.
        """
        member = self.members.pop(key, None)
        if member is not None:
            self._give_back(key, member)

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
            turns, chunk = [], self._prefill_chunk
            for key, member in list(self.members.items()):
                if member.news:
                    self._catch_up(key, member)
                if member.session is not None and member.next is not None:
                    segment, nodes = member.next
                    reads = len(segment.tokens) - len(nodes)
                    if reads <= chunk:  # a prompt's chunk must not wait for another session's
                        chunk -= reads
                        turns.append(Turn(key, member.session, segment, nodes))
            if turns:
                return turns
            await self._changed.wait()

    def _catch_up(self, key: Attachment, member: Member) -> None:
        """Applies what the upstream said. A session with nothing left to draft says so at once."""
        self._apply_news(key, member)
        session = member.session
        if session is not None:
            delta = session.refill(self._fit(session.contract))
            member.next = self._next(session)
            if session.plan.depth:
                self._tell(key, session, delta, exhausted=member.next is None)

    def _next(self, session: DraftSession) -> tuple[Segment, list[Node]] | None:
        return session.next_segment(
            self._fit(session.contract),
            chunk=self._prefill_chunk,
            limit=self._level_nodes,
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
                    continue
            elif member.session is None or self._apply(member.session, news):
                continue
            member.session = None
            member.place = Taken(member.place.slot, 0, None)  # what it holds is not known any more
            member.news.clear()
            self._resync(key)

    def _begin(self, key: Attachment, member: Member, snapshot: Snapshot) -> DraftSession:
        """The session over what the upstream says, which may be less than it was; KV that is still good is kept."""
        first_id = 1
        if member.session is not None:
            first_id = member.session.next_id
            self._give_back(key, member)
            member.place = self._place(key, snapshot)
        place = member.place
        slot, vocabulary = place.slot, self._engine.vocabulary
        if rule_of(snapshot.contract).drawn is Drawn.SAMPLED:
            return DrawnSession(snapshot, slot, vocabulary, self._shaped, first_id=first_id, cached=place.cached)
        return RankedSession(snapshot, slot, vocabulary, self._ranked, first_id=first_id, cached=place.cached)

    def _place(self, key: Attachment, snapshot: Snapshot) -> Taken:
        place = self.slots.take(snapshot.tokens, key.tenant)
        self._passes.fill(place)
        return place

    def _give_back(self, key: Attachment, member: Member) -> None:
        held = member.session.tokens[: member.session.cached] if member.session else []
        self.slots.give_back(member.place.slot, held, key.tenant)

    def _apply(self, session: DraftSession, update: Update) -> bool:
        """False when the copy turns out to be another one than the upstream's."""
        if update.position != len(session.tokens):
            return False
        if update.tokens:
            move = session.commit(update.tokens)
            if move is not None:
                self._passes.move(session.slot, move.source, move.target)
        session.obey(update)
        return session.tree.digest == update.digest

    async def _forward(self, turns: Sequence[Turn]) -> NDArray[np.float32]:
        """The packed pass; noise and lessons are dealt with meanwhile."""
        self.progress.begin()
        logits = await self._passes.forward([turn.segment for turn in turns], partial(self._prepare, turns))
        self.progress.end()
        return logits

    def _prepare(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            for node in turn.nodes:
                turn.session.sampler.prepare(node.position + 1)
            turn.session.learn(self._fit(turn.session.contract))

    def _propose(self, turns: Sequence[Turn], logits: NDArray[np.float32]) -> None:
        first = 0
        for turn in turns:
            rows = logits[first : first + len(turn.nodes)]
            first += len(rows)
            member = self.members.get(turn.key)
            if member is None or member.session is not turn.session:
                continue  # it ended while the pass ran
            turn.session.advance(turn.segment, turn.nodes)
            delta = turn.session.expand(turn.nodes, rows, self._fit(turn.session.contract))
            member.next = self._next(turn.session)
            self._tell(turn.key, turn.session, delta, exhausted=member.next is None)

    def _tell(self, key: Attachment, session: DraftSession, delta: Delta, *, exhausted: bool) -> None:
        """Sends what is new; when that was all until the next commit, also what was held back until then."""
        if exhausted:
            rest = session.rest(self._fit(session.contract))
            if rest.tokens:
                self._deliver(key, session, delta, exhausted=False)
                delta = rest
        self._deliver(key, session, delta, exhausted=exhausted)

    def _deliver(self, key: Attachment, session: DraftSession, delta: Delta, *, exhausted: bool) -> None:
        self.nodes += len(delta.tokens)
        if delta.tokens or exhausted:
            self._send(key, delta, session.plan.version, exhausted)

    def _fit(self, contract: Contract) -> Fits:
        """Scores are fitted per rule and class of temperature."""
        return self._fits.setdefault((contract.rule, contract.heat), Fits())
