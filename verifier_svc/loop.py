"""The verifier's step loop over all its sessions: choose, forward, walk, commit; with heads, draft.

No session that decodes waits for another: each step takes every one that is ready, with its root alone or its root and
the best of its tree, and besides one chunk of the prompts that are still to be read, first come first served.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from outrider.core.budget import Budget, CostModel, choose_budget
from outrider.core.contract import OFF, Contract, Overlap, StepReport
from outrider.core.digest import NOTHING, Prefix
from outrider.core.pace import Pace
from outrider.core.rules import Rows, Walk
from outrider.core.tree import Node
from outrider.core.ways import Way
from outrider.engine.engine import Engine
from outrider.engine.logits import Logits
from outrider.engine.passes import Passes
from outrider.engine.slots import Slots
from outrider.errors import Moved, Superseded
from outrider.rpc.liveness import Progress
from verifier_svc.fused import Fusing, NoFusing
from verifier_svc.levels import Drafting, NoHeads
from verifier_svc.memory import Memory
from verifier_svc.own import OwnDrafting
from verifier_svc.session import Commit, Reading, Session, Start
from verifier_svc.step import Step, Verdicts, Work, make_noise
from verifier_svc.tally import Tally
from verifier_svc.timing import StepTime, StepTimes
from verifier_svc.windows import advance, look_ahead, settle

GOING_DOWN = "this verifier is going down; ask another one"
READS = Contract(seed=0, max_tokens=1)  # of a text that is only read
FAIR_SHARES = 2  # of a step's nodes that one session may have, where several compete: a boastful drafter starves nobody
LEAST_SHARE = 4

log = logging.getLogger(__name__)


class StepLoop:
    """Owns the engine and the sessions. `publish` is told of every commit, before the next step starts; `pause` of a
    session for which drafting would come too late, because its step has begun."""

    def __init__(
        self,
        engine: Engine,
        cost: CostModel,
        *,
        prefill_chunk: int,
        max_nodes: int,
        publish: Callable[[Session, int, Sequence[int]], None],
        pause: Callable[[Session], None] = lambda session: None,
        own: OwnDrafting | None = None,
        heads: Drafting | None = None,
        fusing: Fusing | None = None,
    ) -> None:
        self.sessions: dict[str, Session] = {}
        self.freed = asyncio.Event()  # set whenever a slot is given back
        self.progress = Progress()
        self.times = StepTimes()
        self.tally = Tally()
        self.slots = Slots(engine.slots, rewinds=not engine.treeless)
        self.cost = cost
        self._engine = engine
        self._prefill_chunk = prefill_chunk
        self._max_nodes = 0 if engine.treeless else max_nodes
        self._swept = max_nodes  # tokens of a pass up to which its cost was measured
        self._publish = publish
        self._pause = pause
        self._own = own or OwnDrafting()
        self._heads = heads or NoHeads()
        self._fusing = fusing or NoFusing()
        self._passes = Passes(engine)
        self._memory = Memory(engine, self._passes, self.slots, max_nodes)
        self.pace = Pace(cost)
        self._passing: Sequence[Session] = ()  # whom the pass that runs serves
        self._ended = 0.0  # when the last pass ended
        self._committed = 0.0  # when its commits went out
        self._changed = asyncio.Event()
        self._left: Callable[[], None] | None = None  # it is going down, and this hears when it has let go
        self._over = False  # `run` has ended

    def open(self, start: Start) -> Session:
        """Gives a session a slot, if possible one that holds the KV of its first tokens.

        A session that is open under an older epoch is closed as fenced, and its KV stays for the new one. Raises
        Superseded for an epoch that is not newer, Overloaded when slots are out, Moved when it is going down.
        """
        if self.leaving:
            raise Moved(GOING_DOWN)
        present = self.sessions.get(start.session_id)
        if present:
            if start.epoch <= present.epoch:
                raise Superseded(f"session {start.session_id} is owned under epoch {present.epoch}")
            present.fenced = True
            self.close(present)
        place = self.slots.take(start.tokens, start.tenant, start.session_id)
        self._passes.fill(place)
        own = self._own.begin(start.tenant, start.contract)
        heads = self._heads.open(start.contract, place, self._passes)
        patterns = self.pace.patterns(greedy=start.contract.greedy)
        engine = self._engine
        session = Session(start, place, engine.vocabulary, patterns, own, heads, sayable=engine.sayable)
        session.fused = self._fusing.open(place, self._passes)
        session.follow(self.pace.way)
        self.sessions[session.id] = session
        self.wake()
        return session

    async def read(self, tokens: Sequence[int], tenant: str, known: Prefix = NOTHING) -> int:
        """Reads a text; its KV stays in a free slot. Returns how many tokens' KV is there. Raises as `open`.

        `known`: as a tree over the text takes it.
        """
        if self.leaving:
            raise Moved(GOING_DOWN)
        place = self.slots.take(tokens, tenant)
        self._passes.fill(place)
        self._heads.open(READS, place, self._passes)
        self._fusing.open(place, self._passes)
        start = Start(f"reading {secrets.token_hex(8)}", tenant, 0, tokens, len(tokens), READS, OFF, 1, known)
        reading = Reading(start, place, self._engine.vocabulary, self.pace.patterns(greedy=True), None)
        self.sessions[reading.id] = reading
        self.wake()
        try:
            if reading.ready:
                await reading.commits.get()
        finally:
            self.close(reading)
        return reading.cached

    def close(self, session: Session) -> None:
        """Ends a session: no new step starts for it, and its KV stays until memory is needed. Repeating it changes
        nothing.

        A pass that runs writes behind the rows that count, so the slot may be taken at once; where rows cannot be
        taken back, nothing of it counts then.
        """
        if self.sessions.get(session.id) is not session:
            return
        del self.sessions[session.id]
        session.finished = True
        session.leave_answer()
        session.commits.put_nowait(None)
        session.watch.close()
        lost = self._engine.treeless and session in self._passing
        held = [] if lost else session.tokens[: session.cached]
        self.slots.give_back(session.place.slot, held, session.tenant, session.id)
        self._passes.release(session.place.slot, len(held))
        self.freed.set()
        self.wake()  # there may be memory for another one
        session.dismiss("fenced" if session.fenced else "finished")

    @property
    def preempted(self) -> int:
        """How often a session's KV was let go, for want of memory."""
        return self._memory.preempted

    @property
    def leaving(self) -> bool:
        """Whether it is going down."""
        return self._over or self._left is not None

    def leave(self, left: Callable[[], None]) -> None:
        """Starts no further step: when the one that runs has committed, sessions are closed as moved, and `left` is
        called."""
        self._left = left
        self.wake()
        if self._over:
            left()

    def met(self) -> None:
        """A drafter's stream has opened: other drafters than those that were measured."""
        self.pace.forget()

    def wake(self) -> None:
        """Something changed that may make a session ready or a tree better."""
        self._changed.set()

    async def run(self) -> None:
        """Steps until cancelled. When it ends, whatever ends it, sessions are let go at once, as moved."""
        try:
            while True:
                step = await self._choose()
                logits = await self._forward(step)
                walks = self._walk(step, logits)
                self._heads.keep(step, walks, self._passes)
                await self._fusing.keep(step, walks, self._passes)
                self._commit(step, walks)
                await self._heads.draft(step, self._passes)
        finally:
            self._over = True
            self._let_go(self._left or (lambda: None))
            self._passes.close()

    async def _choose(self) -> Step:
        """Waits for work, and while a better tree is worth more than the time; then takes the best of all trees."""
        waited, follows = 0.0, bool(self._ended)
        while True:
            self._changed.clear()
            if self._left is not None:
                self._let_go(self._left)
            ready = sorted(
                self._memory.seated(self.sessions.values()), key=_reads
            )  # readers take what is left of the chunk
            if not ready:
                follows = False
                await self._passes.rest(self._changed)
                continue
            now = time.monotonic()
            step, budget = self._select(ready, now)
            hold = self.pace.patience(step.sessions, budget, now) if step.decodes and self._max_nodes else 0.0
            if hold <= 0.0:
                step.waited, step.follows = waited, follows
                return step
            held = time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(hold):
                    await self._changed.wait()
            waited += time.monotonic() - held

    def _let_go(self, left: Callable[[], None]) -> None:
        for session in [*self.sessions.values()]:
            session.moved = True
            self.close(session)
        left()

    def _select(self, ready: Sequence[Session], now: float) -> tuple[Step, Budget]:
        works = self._base_works(ready)
        base = sum(work.end - work.start for work in works)
        rows: dict[Node, int] = {}
        everyone = [work for work in works if work.chooses]
        certain = len(everyone) + self._take_whole(everyone, rows)
        base += len(rows)
        deciding = [work for work in everyone if not work.session.whole]
        share = max(LEAST_SHARE, FAIR_SHARES * self._max_nodes // max(1, len(deciding)))
        offers = [_offers(work, min(share, work.session.ceilings.nodes)) for work in deciding]
        ranked = list(itertools.islice(heapq.merge(*offers, key=_score_of), self._max_nodes))
        waited = min(now - self._ended, self.cost.seconds(base))  # a loop that was idle has not waited for this step
        reads = base - len(everyone) - len(rows)
        certain += self.cost.in_tokens(len(everyone), reads)
        scores = [-cost for cost, _, _ in ranked]
        budget = choose_budget(scores, base, certain, self.cost, waited)
        ahead, price = look_ahead(deciding, base, budget, self.cost, self.times, self._max_nodes)
        if ahead:
            budget = choose_budget(scores[: self._max_nodes - ahead], base + ahead, certain + price, self.cost, waited)
        for _, work, node in ranked[: budget.nodes]:
            work.add(node, rows)
        return Step(works, budget.price, budget.expected / budget.seconds, reads), budget

    def _take_whole(self, works: Sequence[Work], rows: dict[Node, int]) -> float:
        """Takes the trees that are taken as they are, level by level: choosing by what was drawn would bias the text.

        For the same reason a session is held to what its plan allows it and not to what it has. Returns the tokens that
        are expected of them.
        """
        expected, left = 0.0, self._max_nodes
        for work in works:
            session = work.session
            allowed = session.ceilings.nodes
            if not session.whole or allowed > left:
                continue
            left -= allowed
            for level in itertools.islice(session.tree.levels(), min(session.ceilings.depth, session.room - 1)):
                if len(work.nodes) + len(level) > allowed:
                    break
                for node in level:
                    expected += session.tree.score(node)
                    work.add(node, rows)
        return expected

    def _base_works(self, ready: Sequence[Session]) -> list[Work]:
        """The roots of all sessions that decode, and a chunk of what others have to read first."""
        works, chunk = [], self._prefill_chunk
        for session in ready:
            pending = session.unread
            taken = pending if pending == 1 else min(pending, chunk)
            chunk -= taken if pending > 1 else 0
            if taken:
                works.append(Work(session, session.cached, session.cached + taken))
        return works

    async def _forward(self, step: Step) -> Logits:
        """The packed pass; the noise is computed meanwhile."""
        segments = [work.segment() for work in step.works]
        draws = [work.draw if self._engine.draws else None for work in step.works]
        began = time.monotonic()
        self.progress.begin()
        self._passing = step.sessions
        logits = await self._passes.judge(segments, draws, partial(self._meanwhile, step))
        before, self._ended = self._ended, time.monotonic()
        self._passing = ()
        step.began, step.seconds = began, self._ended - began
        if step.follows:
            self.times.add(StepTime(step.tokens, step.seconds, step.waited, began - before - step.waited))
        self.progress.end()
        if step.tokens <= self._swept:
            self.cost.observe(step.tokens, step.seconds)
        return logits

    def _meanwhile(self, step: Step) -> None:
        """While the pass runs: stills the drafters that take turns with it, and computes the noise."""
        for session in step.sessions:
            if session.way is Way.TURNS and session.drafting:
                self._pause(session)
        make_noise(step, draws=self._engine.draws)

    def _walk(self, step: Step, logits: Logits) -> list[Walk | None]:
        """For each session the target's own tokens as far as its tree holds them; None inside a prompt."""
        walks: list[Walk | None] = []
        first = 0
        for work in step.works:
            if not work.chooses:
                walks.append(None)
                continue
            judge = Verdicts(work, logits, first)
            first += work.outputs
            rows = Rows([-1, *work.parents], [-1, *(node.token for node in work.nodes)])
            walks.append(work.session.rule.walk(rows, judge, judge.chance()))
            advance(work, judge)
        return walks

    def _commit(self, step: Step, walks: Sequence[Walk | None]) -> None:
        """Keeps the KV of what was accepted, appends, re-roots, and tells everybody."""
        now = time.monotonic()
        self._own.stepped()
        rates = self.pace.rates if self.pace.way is Way.REST else (0, 0)
        said: list[tuple[Session, Commit]] = []
        for work, walked in zip(step.works, walks, strict=True):
            session = work.session
            if session.finished:  # it was closed while the pass ran
                continue
            if walked is None:
                session.cached = work.end
                self.slots.computed(session.place.slot, session.cached)
                session.draft_own()
                if session.traced is not None:
                    session.traced.read(step, work)
                if isinstance(session, Reading) and not session.ready:
                    self.close(session)
                continue
            choices = walked.choices[: session.end - len(session.tokens)]
            for count, choice in enumerate(choices, 1):
                if choice.token in session.contract.stop_ids:
                    choices = choices[:count]
                    break
            accepted = min(len(walked.path), len(choices))
            path = [work.nodes[row - 1] for row in walked.path[:accepted]]
            first, level = session.arrivals.times
            report = StepReport(
                verified=len(work.nodes),
                accepted=accepted,
                verified_depth=max((node.position for node in work.nodes), default=session.tree.root.position)
                - session.tree.root.position,
                waited_us=int(step.waited * 1e6),
                forward_us=int(step.seconds * 1e6),
                wire_bytes=session.wire_bytes,
                plan_version=session.plan.version,
                drafters=len(session.subscriptions),
                elapsed_us=int((now - session.committed_at) * 1e6) if session.committed_at else 0,
                rows=step.tokens,
                sessions=len(step.works),
                first_us=int(first * 1e6),
                level_us=int(level * 1e6),
                ranks=bytes(map(_rank, path)),
                resting=session.resting,
                plain_rate=rates[0],
                drafted_rate=rates[1],
            )
            session.wire_bytes = 0
            if session.watch.watched:
                session.watch.show(work, path, choices, report)
            traced = session.traced
            pending = None if traced is None else traced.before(work)
            settle(work, path, choices, step.price)
            if session.heads is not None:
                session.heads.settle(session.tree, path, [choice.token for choice in choices])
            session.learn(work.nodes, set(path))
            owed = session.owed(work.nodes, set(path))
            session.verified_price = step.price
            said.append((session, session.commit(choices, report, now, owed)))
            self._keep(work, walked.path[:accepted])
            if traced is not None and pending is not None:
                traced.after(step, pending, len(choices), accepted)
        if step.follows and any(map(_teaches, step.sessions)):
            committed = sum(len(commit.choices) for _, commit in said)
            self.pace.learn(
                self.sessions.values() or step.sessions, len(said), step.reads, committed, now - self._committed
            )
        self._committed = now
        for session in self.sessions.values():
            session.follow(self.pace.way)
        for session, commit in said:
            self._publish(session, commit.position, [choice.token for choice in commit.choices])
        self.tally.passed(step.tokens, step.seconds, step.waited)
        for _, commit in said:
            self.tally.committed_for(commit.report, len(commit.choices))

    def _keep(self, work: Work, path: Sequence[int]) -> None:
        """Moves the accepted rows up behind the committed ones. The root's own row is among the pending ones."""
        session = work.session
        chain = work.end - work.start
        if path and path[-1] != len(path):
            source = session.cached + chain - 1 + np.array(path)
            target = session.cached + chain + np.arange(len(path))
            self._passes.move(session.place.slot, source, target)
        session.cached += chain + len(path)
        self.slots.computed(session.place.slot, session.cached)


def _reads(session: Session) -> bool:
    return isinstance(session, Reading)


def _rank(node: Node) -> int:
    """How many of its siblings have a better score; several drafters together may have sent more than a byte says."""
    assert node.parent is not None
    return min(255, sum(sibling.edge > node.edge for sibling in node.parent.children.values()))


def _teaches(session: Session) -> bool:
    """Whether its steps show how drafters had better work."""
    return session.drafting and session.plan.overlap not in (Overlap.ALWAYS, Overlap.ROUNDS)


def _offers(work: Work, most: int) -> list[tuple[float, Work, Node]]:
    """At most `most` of a session's nodes, best first; the score is negated so that merging keeps the order.

    None is so deep that its path and the token after it would be more than the step may commit.
    """
    plan = work.session.ceilings
    best = work.session.tree.best_first(depth=min(plan.depth, work.session.room - 1), width=plan.width)
    return [(-score, work, node) for score, node in itertools.islice(best, most)]


def _score_of(offer: tuple[float, Work, Node]) -> float:
    return offer[0]
