"""The drafter's scheduler over all its sessions: choose, forward, propose, send; one level of each tree at a time."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import NamedTuple

from drafter_svc.own_adapters import OwnAdapters
from drafter_svc.relay import LowerTier, NoLowerTier, Relay
from drafter_svc.sessions.eagle_session import EagleSampledSession, EagleTopKSession
from drafter_svc.sessions.mirror import Inbox
from drafter_svc.sessions.sampled_session import SampledSession
from drafter_svc.sessions.session import DrafterSession
from drafter_svc.sessions.topk_session import TopKSession
from drafter_svc.upstreams.refusals import UPSTREAM_ENDED
from drafter_svc.upstreams.upstream import Attachment
from outrider.core.acceptance import ChildSampling, rule_of
from outrider.core.construction import construction_of, static_construction_of
from outrider.core.construction.expansion import CANDIDATES, DrafterFits
from outrider.core.sampling.noise import Draw
from outrider.core.session.contract import Contract
from outrider.core.session.snapshot import MirrorSnapshot, MirrorUpdate
from outrider.core.stats import Ema
from outrider.core.tree.delta import Delta, Hints
from outrider.core.tree.node import Node
from outrider.engine.executor import Executor
from outrider.engine.growth import LEVEL_ROWS, MOST_LEVELS, GrownLevel, Growth
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Engine
from outrider.engine.interface.logits import Logits, logits_rows
from outrider.engine.kv.kv_slots import AcquiredSlot, KvSlots
from outrider.engine.kv.page_budget import PageBudget
from outrider.grammar.compiler import GrammarCompiler
from outrider.rpc.liveness import WorkClock
from outrider.telemetry.metrics import histogram

GROWN_S = 0.002  # longest time, usually, for which a commit waits because levels run that the engine has grown
READ_ON = 1024  # tokens of long texts that all sessions together read beside a pass; takes about two milliseconds
EMA_WEIGHT = 0.1  # weight of the latest level in the average time of a level


@dataclass(slots=True)
class ScheduledSession:
    """A session in the scheduler, and the upstream's messages since the last level."""

    kv_slot: AcquiredSlot
    kv_scope: str  # KV is shared only among sessions with the same value
    adapter: object | None = None  # of the model
    inbox: Inbox = field(default_factory=Inbox)
    session: DrafterSession | None = None
    relay: Relay | None = None  # the session as the lower tier sees it
    next: tuple[Segment, list[Node]] | None = None  # the segment to run next, and the nodes that it expands
    has_read: bool = False  # it has just read all of a long text, so it may propose more
    fits: DrafterFits | None = None  # of its own, where its contract is not representative


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
        lower_tier: LowerTier | None = None,
        grammars: GrammarCompiler | None = None,
        adapters: OwnAdapters | None = None,
    ) -> None:
        """`tree`: name of the construction; `lower_tier`: sends to it; `grammars`: of the model's vocabulary; None:
        grammars are not obeyed; `adapters`: of the model; None: it has none. Raises ConfigError for an unknown name.
        """
        self._construction, self._static_construction = construction_of(tree), static_construction_of(tree)
        self.members: dict[Attachment, ScheduledSession] = {}
        self.sessions: dict[str, Relay] = {}  # by session id, for the lower tier
        self.progress = WorkClock()
        self.slots = KvSlots(engine.slots)
        self.nodes = 0
        self.preempted = 0  # how often a session's KV was released for lack of memory
        self._budget = PageBudget(engine, self.slots)
        self._engine = engine
        self._executor = Executor(engine)
        self._forward_s = histogram("outrider.draft.forward")
        self._level_s = Ema(EMA_WEIGHT, mean=0.0)  # average time of a level, from the choice to the proposals
        self._level_nodes = level_nodes
        self._prefill_chunk = prefill_chunk
        self._send = send
        self._resync = resync
        self._lower_tier = lower_tier or NoLowerTier()
        self._fits: dict[tuple[str, str], DrafterFits] = {}
        self._changed = asyncio.Event()
        self._agreed_before: dict[str, tuple[int, int]] = {}  # counts with earlier engines
        self._grammars = grammars
        self._adapters = adapters
        self._next_engine: Engine | None = None  # replaces the present engine before the next level

    def opened(self, key: Attachment, snapshot: MirrorSnapshot) -> None:
        """Begins or restarts a session. Ignored when no slot is free."""
        member = self.members.get(key)
        if member is None:
            if not self.slots.free:
                return
            adapter, scope = self._adapter_of(key, snapshot.contract)
            kv_slot = self._acquire_slot(key, snapshot, scope)
            member = self.members[key] = ScheduledSession(kv_slot, scope, adapter)
        self._enqueue(key, member.inbox, snapshot)

    def updated(self, key: Attachment, update: MirrorUpdate | Hints) -> None:
        """Queues a commit, new terms, or hints of a session's upstream."""
        member = self.members.get(key)
        if member is not None:
            self._enqueue(key, member.inbox, update)

    def wake(self) -> None:
        """Wakes the scheduler: the lower tier has sent something."""
        self._changed.set()

    def on_drafter_connected(self, drafter_id: str) -> None:
        """Do nothing: no measurement depends on which drafters the lower tier has."""

    def closed(self, key: Attachment) -> None:
        """End a session. Its KV stays until memory is needed.

        A pass that runs writes only behind the rows that count, so the slot may be acquired at once.
        """
        member = self.members.pop(key, None)
        if member is not None:
            if member.relay is not None:
                del self.sessions[member.relay.id]
                member.relay.dismiss(UPSTREAM_ENDED)
            self._give_back(key, member)
            self._changed.set()  # there may be memory for another session

    def _enqueue(self, key: Attachment, inbox: Inbox, message: MirrorSnapshot | MirrorUpdate | Hints) -> None:
        """Queues a message until the running pass ends; requests a snapshot when too many are queued."""
        if inbox.add(message):
            self._changed.set()
        else:
            self._resync(key)

    @property
    def level_s(self) -> float:
        """Seconds of a level, on average; 0: none has run."""
        return self._level_s.mean

    def replace_engine(self, engine: Engine) -> None:
        """Drafts with another engine of the same shape from the next level on. Sessions read their texts again."""
        self._next_engine = engine
        self._changed.set()

    def agreement(self) -> dict[str, tuple[int, int]]:
        """Return, by temperature bucket, how many best candidates were the target's choice, of how many compared, in
        representative sessions."""
        counts = dict(self._agreed_before)
        for (_, bucket), fits in tuple(self._fits.items()):
            agreed, compared = counts.get(bucket, (0, 0))
            counts[bucket] = agreed + fits.agreed, compared + fits.compared
        return counts

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
            self._take_engine()
            parts, chunk, hold = [], self._prefill_chunk, math.inf
            line = list(self.members.items())
            self._budget.open()
            for index, (key, member) in enumerate(line):
                self._follow_adapter(key, member)
                if member.inbox or member.has_read or (member.relay is not None and member.relay.changed):
                    self._catch_up(key, member)
                if (left := self._hold_s(member)) > 0.0:
                    hold = min(hold, left)
                elif member.session is not None and member.next is not None:
                    segment, nodes = member.next
                    reads = len(segment.tokens) - len(nodes)
                    # All sessions share the chunk; one whose prompt does not fit waits for the next level.
                    if reads <= chunk and self._reserve(member.session, segment, line[index + 1 :]):
                        chunk -= reads
                        parts.append(LevelPart(key, member.session, segment, nodes, self._fit(member, member.session)))
            if parts:
                return parts
            if self._read_on():
                await asyncio.sleep(0)  # let other tasks run
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(hold if hold < math.inf else None):
                    await self._executor.wait_idle(self._changed)

    def _reserve(
        self, session: DrafterSession, segment: Segment, behind: Sequence[tuple[Attachment, ScheduledSession]]
    ) -> bool:
        """Return whether there is memory for a session's next segment and all of its text. Preempt sessions `behind` it
        as far as needed: the first session in line always drafts.
        """
        if not self._budget.bounded:
            return True
        self._executor.run_queued()
        grown = MOST_LEVELS * LEVEL_ROWS if self._engine.grows else 0
        end = max(segment.prefix + segment.span + grown, len(session.tokens))
        return self._budget.reserve(session.slot, session.cached, end, self._preemptions(behind))

    def _preemptions(self, behind: Sequence[tuple[Attachment, ScheduledSession]]) -> Iterator[ScheduledSession]:
        """Yield sessions whose KV was released, from the last one on; they read their texts again later."""
        for _, member in reversed(behind):
            if member.session is not None and member.session.cached:
                self.preempted += 1
                self._drop_kv(member)
                self.slots.mark_computed(member.kv_slot.slot, 0)
                self._engine.release(member.kv_slot.slot, 0)
                yield member

    def _drop_kv(self, member: ScheduledSession) -> None:
        """Drop a session's KV; the nodes that it has sent stay valid at the upstream."""
        member.kv_slot, member.next = AcquiredSlot(member.kv_slot.slot, 0, None), None
        if member.session is not None and not member.session.drop_kv():
            member.inbox.appendleft(member.session.snapshot())

    def _read_on(self) -> bool:
        """Read more of long texts, to find repetitions in. Return whether any session read."""
        left = READ_ON
        for member in self.members.values():
            if left and member.session is not None and member.session.behind:
                left -= member.session.read_on(left)
                member.has_read = not member.session.behind
        return left < READ_ON

    def _take_engine(self) -> None:
        """Installs the new engine, if one is set. No pass may run. Slots hold no KV of the new engine."""
        if self._next_engine is None:
            return
        self._engine, self._next_engine = self._next_engine, None
        self._executor.replace_engine(self._engine)
        self._agreed_before = self.agreement()
        self._fits.clear()  # fitted to another model's scores
        self.slots.clear()
        self._budget = PageBudget(self._engine, self.slots)
        for member in self.members.values():
            member.fits = None
            self._drop_kv(member)

    def _hold_s(self, member: ScheduledSession) -> float:
        """Return the seconds that a level may wait for nodes of the lower tier; a prompt is read at once."""
        if member.relay is None or member.next is None or not member.next[1]:
            return 0.0
        return member.relay.hold_s(time.monotonic(), self._level_s.mean)

    def _catch_up(self, key: Attachment, member: ScheduledSession) -> None:
        """Apply the upstream's messages. A session with nothing left to draft sends `exhausted` at once."""
        self._apply_inbox(key, member)
        session, member.has_read = member.session, False
        if session is not None:
            self._follow_grammar(key, session)
            if member.relay is not None:
                member.relay.changed = False
            delta = session.refill(self._fit(member, session))
            member.next = self._next(member, session)
            if session.plan.depth:
                self._send_new(key, member, session, delta)

    def _follow_grammar(self, key: Attachment, session: DrafterSession) -> None:
        """Has a session draft within its contract's grammar, as soon as that is compiled."""
        grammar = session.contract.grammar
        if grammar is not None and session.sampler.grammar is None and self._grammars is not None:
            answer = session.tokens[session.answer_position :]
            session.sampler.grammar = self._grammars.known(grammar, answer, key.tenant)

    def _adapter_of(self, key: Attachment, contract: Contract) -> tuple[object | None, str]:
        """Return the model's own adapter for a contract, once it is loaded, and the scope of its KV."""
        if contract.adapter is None or self._adapters is None:
            return None, key.tenant
        loop = asyncio.get_running_loop()
        adapter = self._adapters.known(
            contract.adapter, self._engine, partial(loop.call_soon_threadsafe, self._changed.set)
        )
        return adapter, key.tenant if adapter is None else contract.kv_scope(key.tenant)

    def _follow_adapter(self, key: Attachment, member: ScheduledSession) -> None:
        """Have a session begin anew with the model's own adapter, as soon as that is loaded."""
        session = member.session
        if session is not None and member.adapter is None and session.contract.adapter is not None:
            adapter, _ = self._adapter_of(key, session.contract)
            if adapter is not None:
                member.inbox.appendleft(session.snapshot())

    def _next(self, member: ScheduledSession, session: DrafterSession) -> tuple[Segment, list[Node]] | None:
        return session.next_segment(
            self._fit(member, session),
            chunk=self._prefill_chunk,
            limit=max(self._level_nodes, session.plan.nodes if member.relay and member.relay.subscriptions else 0),
            context=self._engine.context,
            rows=self._engine.rows,
            level_s=self._level_s.mean,
        )

    def _apply_inbox(self, key: Attachment, member: ScheduledSession) -> None:
        while member.inbox:
            message = member.inbox.popleft()
            if isinstance(message, MirrorSnapshot):
                member.session = self._begin(key, member, message)
                member.session.adapter = member.adapter
                if member.session.tree.digest == message.digest:
                    self._relay(key, member, member.session)
                    continue
            elif member.session is None or self._apply(member, member.session, message):
                continue
            _close_grammar(member)
            member.session = member.next = None
            member.kv_slot = AcquiredSlot(member.kv_slot.slot, 0, None)  # the slot's contents are unknown now
            self.slots.mark_computed(member.kv_slot.slot, 0)
            member.inbox.clear()
            self._resync(key)

    def _begin(self, key: Attachment, member: ScheduledSession, snapshot: MirrorSnapshot) -> DrafterSession:
        """Return a session over a snapshot, whose text may be shorter than before; KV that is still valid is kept."""
        first_id, repeats = 1, None
        if member.session is not None:
            first_id = member.session.next_id
            repeats = member.session.repeats if isinstance(member.session, TopKSession) else None
            self._give_back(key, member)
            member.adapter, member.kv_scope = self._adapter_of(key, snapshot.contract)
            member.kv_slot = self._acquire_slot(key, snapshot, member.kv_scope)
        kv_slot, vocabulary = member.kv_slot, self._engine.unpadded_vocabulary
        if snapshot.features is not None:
            first = len(snapshot.tokens) - len(snapshot.features)
            self._executor.enqueue(partial(self._engine.feed, kv_slot.slot, first, snapshot.features, restart=True))
        if rule_of(snapshot.contract).child_sampling is ChildSampling.SAMPLED:
            sampled_type = EagleSampledSession if self._engine.fed_width else SampledSession
            return sampled_type(
                snapshot, kv_slot.slot, vocabulary, self._static_construction, first_id=first_id, cached=kv_slot.cached
            )
        topk_type = EagleTopKSession if self._engine.fed_width else TopKSession
        return topk_type(
            snapshot,
            kv_slot.slot,
            vocabulary,
            self._construction,
            first_id=first_id,
            cached=kv_slot.cached,
            repeats=repeats,
        )

    def _acquire_slot(self, key: Attachment, snapshot: MirrorSnapshot, scope: str) -> AcquiredSlot:
        kv_slot = self.slots.acquire(snapshot.tokens, scope, key.session_id)
        self._executor.prepare_slot(kv_slot)
        return kv_slot

    def _give_back(self, key: Attachment, member: ScheduledSession) -> None:
        _close_grammar(member)
        held = member.session.tokens[: member.session.cached] if member.session else []
        self.slots.release(member.kv_slot.slot, held, member.kv_scope, key.session_id)
        self._executor.release(member.kv_slot.slot, len(held))

    def _relay(self, key: Attachment, member: ScheduledSession, session: DrafterSession) -> None:
        """Open the session for the lower tier, or restart it there."""
        if member.relay is not None:
            member.relay.restart(session)
            return
        member.relay = Relay(key, session, self._lower_tier, partial(self._forward_up, key, member))
        self.sessions[key.session_id] = member.relay
        self._lower_tier.subscribe_waiting(member.relay)

    def _forward_up(
        self, key: Attachment, member: ScheduledSession, nodes: Sequence[Node], origin: str, span: bytes
    ) -> None:
        """Send the lower tier's nodes up at once, with this model's scores where it has them."""
        session = member.session
        if session is not None and nodes:
            session.rescore(nodes, self._fit(member, session))
            self._deliver(key, session, session.announce(nodes, origin, span), exhausted=False)

    def _apply(self, member: ScheduledSession, session: DrafterSession, message: MirrorUpdate | Hints) -> bool:
        """Apply a message. Return False when the mirror differs from the upstream's copy."""
        if isinstance(message, Hints):
            session.tree.hint(message)
            return True
        update, relay = message, member.relay
        if update.position != len(session.tokens):
            return False
        if update.tokens:
            if relay is not None:
                relay.calibrate_committed(update.tokens)
            move = session.commit(update.tokens)
            if move is not None:
                self._executor.move(session.slot, move.source, move.target)
            if update.features is not None:
                self._executor.enqueue(
                    partial(self._engine.feed, session.slot, update.position, update.features, restart=False)
                )
        dropped = session.apply_terms(update)
        if session.tree.digest != update.digest:
            return False
        if relay is not None:
            self._lower_tier.report_dropped(relay.owners(dropped))
            relay.publish(update.position, update.tokens, time.monotonic())
        return True

    async def _forward(self, parts: Sequence[LevelPart]) -> tuple[Logits, _Grown]:
        """Run the packed pass, and further levels behind it where the engine can; prepare noise, fit scores and
        read long texts meanwhile.
        """
        draws = [part.session.draw(self._engine) for part in parts]
        segments, prepare = [part.segment for part in parts], partial(self._prepare, parts, draws)
        began = time.monotonic()
        self.progress.begin()
        grown = _Grown([], {})
        growths, levels = self._growths(parts, draws) if self._engine.grows else ((), 0)
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
            fits = part.segment.prefix + part.segment.span + MOST_LEVELS * LEVEL_ROWS <= self._engine.rows
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
            self.slots.mark_computed(part.session.slot, part.session.cached)
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
            held_back = session.flush(self._fit(member, session))
            if held_back.tokens:
                self._deliver(key, session, delta, exhausted=False)
                delta = held_back
        self._deliver(key, session, delta, exhausted=exhausted)

    def _deliver(self, key: Attachment, session: DrafterSession, delta: Delta, *, exhausted: bool) -> None:
        self.nodes += len(delta.tokens)
        if delta.tokens or delta.rescored or exhausted:
            self._send(key, delta, session.plan.version, exhausted)

    def _fit(self, member: ScheduledSession, session: DrafterSession) -> DrafterFits:
        """Return the fits of a session's scores: those that sessions of one rule and temperature bucket share, or its
        own copy where it is not representative."""
        contract = session.contract
        kind = contract.rule, contract.temperature_bucket
        shared = self._fits.get(kind)
        if shared is None:
            shared = self._fits[kind] = DrafterFits()
        if session.representative:
            return shared
        if member.fits is None:
            member.fits = deepcopy(shared)
        return member.fits


def _close_grammar(member: ScheduledSession) -> None:
    """Give up the session's place in its grammar."""
    if member.session is not None and member.session.sampler.grammar is not None:
        member.session.sampler.grammar.close()
