"""The drafter's scheduler over all its sessions: choose, forward, propose, send; one level of each tree at a time."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import NamedTuple

from drafter_svc.mirrored_sessions import MirroredSessions, ScheduledSession
from drafter_svc.own_adapters import OwnAdapters
from drafter_svc.sessions.session import DrafterSession
from drafter_svc.shared_fits import SharedFits
from drafter_svc.upstreams.upstream import Attachment
from outrider.core.construction.expansion import CANDIDATES, DrafterFits
from outrider.core.sampling.noise import Draw
from outrider.core.stats import Ema
from outrider.core.tree.delta import Delta
from outrider.core.tree.node import Node
from outrider.engine.executor import Executor
from outrider.engine.growth import LEVEL_ROWS, MOST_LEVELS, GrownLevel, Growth
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Engine
from outrider.engine.interface.logits import Logits, logits_rows
from outrider.grammar.compiler import GrammarCompiler
from outrider.rpc.liveness import WorkClock
from outrider.telemetry.metrics import histogram
from outrider.upstream.servicer import UpstreamServicer

GROWN_S = 0.002  # longest time, usually, for which a commit waits because levels run that the engine has grown
READ_ON = 1024  # tokens of long texts that all sessions together read beside a pass; takes about two milliseconds
EMA_WEIGHT = 0.1  # weight of the latest level in the average time of a level


@dataclass(frozen=True, slots=True)
class LevelPart:
    """One session's part of a level."""

    key: Attachment
    session: DrafterSession
    segment: Segment
    nodes: list[Node]  # the nodes that the segment's last rows expand
    fits: DrafterFits


class _Grown(NamedTuple):
    """Levels that the engine has grown behind a pass, and the index of each session's tree in them."""

    levels: list[GrownLevel]
    trees: dict[Attachment, int]


class DraftScheduler:
    """Owns the engine and the sessions.

    It calls `send` with new nodes, the plan's version, and whether these were all nodes until the next commit. It calls
    `resync` to request a snapshot when a mirror drifted.

    A commit waits at most for the level that is running: commits are applied before the next level is chosen.
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
        lower_tier: UpstreamServicer | None = None,
        grammars: GrammarCompiler | None = None,
        adapters: OwnAdapters | None = None,
    ) -> None:
        """`tree`: name of the construction; `lower_tier`: its drafters; `grammars`: of the model's vocabulary; None:
        grammars are not obeyed; `adapters`: of the model; None: it has none. Raises ConfigError for an unknown name.
        """
        self.progress = WorkClock()
        self.fits = SharedFits()
        self.nodes = 0
        self._executor = Executor(engine)
        self._changed = asyncio.Event()
        self.members = MirroredSessions(
            self._executor,
            self._changed,
            resync=resync,
            forward_up=self._forward_up,
            tree=tree,
            lower_tier=lower_tier,
            grammars=grammars,
            adapters=adapters,
        )
        self.opened, self.updated, self.closed = self.members.opened, self.members.updated, self.members.closed
        self.sessions = self.members.relays  # by session id, for the lower tier
        self._forward_s = histogram("outrider.draft.forward")
        self._level_s = Ema(EMA_WEIGHT, mean=0.0)  # average time of a level, from the choice to the proposals
        self._level_nodes = level_nodes
        self._prefill_chunk = prefill_chunk
        self._send = send

    def wake(self) -> None:
        """Wakes the scheduler: the lower tier has sent something."""
        self._changed.set()

    def on_drafter_connected(self, drafter_id: str) -> None:
        """Do nothing: no measurement depends on which drafters the lower tier has."""

    @property
    def level_s(self) -> float:
        """Seconds of a level, on average; 0: none has run."""
        return self._level_s.mean

    async def run(self) -> None:
        """Grows trees until cancelled."""
        try:
            while True:
                parts = await self._choose()
                began = time.monotonic()
                logits, grown = await self._forward(parts)
                self._propose(parts, logits, grown)
                if all(part.nodes for part in parts):
                    self._level_s.observe((time.monotonic() - began) / (1 + len(grown.levels)))
        finally:
            self._executor.close()

    async def _choose(self) -> list[LevelPart]:
        """Return the parts of the next level, once a level is worth running. Apply the upstreams' messages."""
        while True:
            self._changed.clear()
            if self.members.take_engine():
                self.fits.restart()
            parts, chunk, hold = [], self._prefill_chunk, math.inf
            line = list(self.members.items())
            self.members.budget.open()
            for index, (key, member) in enumerate(line):
                self.members.follow_adapter(key, member)
                if member.inbox or member.has_read or (member.relay is not None and member.relay.changed):
                    self._catch_up(key, member)
                if (left := self._hold_s(member)) > 0.0:
                    hold = min(hold, left)
                elif member.session is not None and member.next is not None:
                    segment, nodes = member.next
                    reads = len(segment.tokens) - len(nodes)
                    # All sessions share the chunk; one whose prompt does not fit waits for the next level.
                    if reads <= chunk and self.members.reserve(member.session, segment, line[index + 1 :]):
                        chunk -= reads
                        parts.append(
                            LevelPart(key, member.session, segment, nodes, self.fits.of(member, member.session))
                        )
            if parts:
                return parts
            if self._read_on():
                await asyncio.sleep(0)  # let other tasks run
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(hold if hold < math.inf else None):
                    await self._executor.wait_idle(self._changed)

    def _read_on(self) -> bool:
        """Read more of long texts, to find repetitions in. Return whether any session read."""
        left = READ_ON
        for member in self.members.values():
            if left and member.session is not None and member.session.behind:
                left -= member.session.read_on(left)
                member.has_read = not member.session.behind
        return left < READ_ON

    def _hold_s(self, member: ScheduledSession) -> float:
        """Return the seconds that a level may wait for nodes of the lower tier; a prompt is read at once."""
        if member.relay is None or member.next is None or not member.next[1]:
            return 0.0
        return member.relay.hold_s(time.monotonic(), self._level_s.mean)

    def _catch_up(self, key: Attachment, member: ScheduledSession) -> None:
        """Apply the upstream's messages. A session with nothing left to draft sends `exhausted` at once."""
        self.members.catch_up(key, member)
        session, member.has_read = member.session, False
        if session is not None:
            if member.relay is not None:
                member.relay.changed = False
            delta = session.refill(self.fits.of(member, session))
            member.next = self._next(member, session)
            if session.plan.depth:
                self._send_new(key, member, session, delta)

    def _next(self, member: ScheduledSession, session: DrafterSession) -> tuple[Segment, list[Node]] | None:
        return session.next_segment(
            self.fits.of(member, session),
            chunk=self._prefill_chunk,
            limit=max(self._level_nodes, session.plan.nodes if member.relay and member.relay.subscriptions else 0),
            context=self._executor.engine.context,
            rows=self._executor.engine.rows,
            level_s=self._level_s.mean,
        )

    def _forward_up(
        self, key: Attachment, member: ScheduledSession, nodes: Sequence[Node], origin: str, span: bytes
    ) -> None:
        """Send the lower tier's nodes up at once, with this model's scores where it has them."""
        session = member.session
        if session is not None and nodes:
            session.rescore(nodes, self.fits.of(member, session))
            self._deliver(key, session, session.announce(nodes, origin, span), exhausted=False)

    async def _forward(self, parts: Sequence[LevelPart]) -> tuple[Logits, _Grown]:
        """Run the packed pass, and further levels behind it where the engine can; prepare noise, fit scores and
        read long texts meanwhile.
        """
        draws = [part.session.draw(self._executor.engine) for part in parts]
        segments, prepare = [part.segment for part in parts], partial(self._prepare, parts, draws)
        began = time.monotonic()
        self.progress.begin()
        grown = _Grown([], {})
        growths, levels = self._growths(parts, draws) if self._executor.engine.grows_trees else ((), 0)
        if levels:
            logits, found = await self._executor.grow(segments, draws, growths, levels, prepare)
            growing = [part.key for part, growth in zip(parts, growths, strict=True) if growth is not None]
            grown = _Grown(found, {key: tree for tree, key in enumerate(growing)})
        else:
            logits = await self._executor.sample(segments, draws, prepare, CANDIDATES)
        self.progress.end()
        self._forward_s.record(time.monotonic() - began)
        return logits, grown

    def _growths(self, parts: Sequence[LevelPart], draws: Sequence[Draw | None]) -> tuple[list[Growth | None], int]:
        """Return how trees grow behind a level, and for how many levels: the most that one of them is worth."""
        beside = MOST_LEVELS if not self._level_s.mean else min(MOST_LEVELS, int(GROWN_S / self._level_s.mean))
        growths: list[Growth | None] = []
        levels = 0
        for part, draw in zip(parts, draws, strict=True):
            relay = self.members[part.key].relay
            alone = draw is not None and not (relay is not None and relay.subscriptions)
            fits = part.segment.prefix + part.segment.span + MOST_LEVELS * LEVEL_ROWS <= self._executor.engine.rows
            found = part.session.growth(part.fits, part.segment, part.nodes, beside) if alone and fits else None
            growths.append(None if found is None else found[0])
            levels = max(levels, 0 if found is None else found[1])
        return growths, levels

    def _prepare(self, parts: Sequence[LevelPart], draws: Sequence[Draw | None]) -> None:
        for part, draw in zip(parts, draws, strict=True):
            for node in part.nodes if draw is None else ():
                part.session.sampler.prepare(node.position + 1)
            if part.session.sampler.grammar is not None:
                part.session.sampler.grammar.prefetch([*map(part.session.tree.path, part.nodes)])
            part.session.learn(part.fits)
        self._read_on()

    def _propose(self, parts: Sequence[LevelPart], logits: Logits, grown: _Grown) -> None:
        first = 0
        for part in parts:
            rows = logits_rows(logits, first, len(part.nodes))
            first += len(rows)
            member = self.members.get(part.key)
            if member is None or member.session is not part.session:
                continue  # the session ended while the pass ran
            part.session.advance(part.segment, part.nodes)
            self.members.slots.mark_computed(part.session.slot, part.session.cached)
            deltas = [part.session.expand(part.nodes, rows, part.fits)]
            if part.key in grown.trees:
                numbered = [*part.nodes, *repeat(None, LEVEL_ROWS)][:LEVEL_ROWS]
                tree = grown.trees[part.key]
                deltas += [part.session.add_level(numbered, level, tree, part.fits) for level in grown.levels]
            if member.relay is not None and part.nodes:
                member.relay.hint(time.monotonic())
            member.next = self._next(member, part.session)
            for delta in deltas[:-1]:
                self._deliver(part.key, part.session, delta, exhausted=False)
            self._send_new(part.key, member, part.session, deltas[-1])

    def _send_new(self, key: Attachment, member: ScheduledSession, session: DrafterSession, delta: Delta) -> None:
        """Send new nodes; when these are the last before the next commit, also those that were held back."""
        exhausted = member.next is None and not (member.relay is not None and member.relay.drafting)
        if exhausted:
            held_back = session.flush(self.fits.of(member, session))
            if held_back.tokens:
                self._deliver(key, session, delta, exhausted=False)
                delta = held_back
        self._deliver(key, session, delta, exhausted=exhausted)

    def _deliver(self, key: Attachment, session: DrafterSession, delta: Delta, *, exhausted: bool) -> None:
        self.nodes += len(delta.tokens)
        if delta.tokens or delta.rescored or exhausted:
            self._send(key, delta, session.plan.version, exhausted)
