"""The sessions that a drafter mirrors: their KV slots, and what their upstreams have sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from drafter_svc.own_adapters import OwnAdapters
from drafter_svc.relay import Relay
from drafter_svc.sessions.kinds import SessionKinds
from drafter_svc.sessions.mirror import Inbox
from drafter_svc.sessions.session import DrafterSession
from drafter_svc.upstreams.refusals import UPSTREAM_ENDED
from drafter_svc.upstreams.upstream import Attachment
from outrider.core.construction.expansion import DrafterFits
from outrider.core.session.contract import Contract
from outrider.core.session.snapshot import MirrorSnapshot, MirrorUpdate
from outrider.core.tree.delta import Hints
from outrider.core.tree.node import Node
from outrider.engine.executor import Executor
from outrider.engine.growth import LEVEL_ROWS, MOST_LEVELS
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Engine
from outrider.engine.kv.kv_slots import AcquiredSlot, KvSlots
from outrider.engine.kv.page_budget import PageBudget
from outrider.grammar.compiler import GrammarCompiler
from outrider.upstream.drafter_sender import DrafterSender
from outrider.upstream.servicer import UpstreamServicer


@dataclass(slots=True)
class ScheduledSession:
    """A session in the scheduler, and the upstream's messages since the last level."""

    kv_slot: AcquiredSlot
    kv_scope: str  # KV is shared only among sessions with the same value
    inbox: Inbox
    adapter: object | None = None  # of the model
    session: DrafterSession | None = None
    relay: Relay | None = None  # the session as the lower tier sees it
    next: tuple[Segment, list[Node]] | None = None  # the segment to run next, and the nodes that it expands
    has_read: bool = False  # it has just read all of a long text, so it may propose more
    fits: DrafterFits | None = None  # of its own, where its contract is not representative

    def close_grammar(self) -> None:
        """Give up the session's place in its grammar."""
        if self.session is not None and self.session.sampler.grammar is not None:
            self.session.sampler.grammar.close()


class MirroredSessions(dict[Attachment, ScheduledSession]):
    """The sessions of all upstreams, and the KV slots of the engine. It sets `changed` when there may be work.

    It calls `resync` to request a snapshot when a mirror drifted, and `forward_up` with nodes of the lower tier.
    """

    def __init__(
        self,
        executor: Executor,
        changed: asyncio.Event,
        *,
        resync: Callable[[Attachment], None],
        forward_up: Callable[[Attachment, ScheduledSession, Sequence[Node], str, bytes], None],
        tree: str,
        lower_tier: UpstreamServicer | None,
        grammars: GrammarCompiler | None,
        adapters: OwnAdapters | None,
    ) -> None:
        """As of DraftScheduler."""
        super().__init__()
        self._kinds = SessionKinds(tree)
        self.relays: dict[str, Relay] = {}  # by session id, for the lower tier
        self.slots = KvSlots(executor.engine.slots, rewinds=executor.engine.rewinds)
        self.preempted = 0  # how often a session's KV was released for lack of memory
        self.budget = PageBudget(executor.engine, self.slots)
        self._executor = executor
        self._changed = changed
        self._resync = resync
        self._forward_up = forward_up
        self._sender = DrafterSender()  # to the lower tier
        self._lower_tier = lower_tier
        self._grammars = grammars
        self._adapters = adapters
        self._next_engine: Engine | None = None  # replaces the present engine before the next level

    def opened(self, key: Attachment, snapshot: MirrorSnapshot) -> None:
        """Begins or restarts a session. Ignored when no slot is free."""
        member = self.get(key)
        if member is None:
            if not self.slots.free:
                return
            adapter, scope = self._adapter_of(key, snapshot.contract)
            kv_slot = self._acquire_slot(key, snapshot, scope)
            inbox = Inbox(self._changed.set, partial(self._resync, key))
            member = self[key] = ScheduledSession(kv_slot, scope, inbox, adapter)
        member.inbox.put(snapshot)

    def updated(self, key: Attachment, update: MirrorUpdate | Hints) -> None:
        """Queues a commit, new terms, or hints of a session's upstream."""
        member = self.get(key)
        if member is not None:
            member.inbox.put(update)

    def closed(self, key: Attachment) -> None:
        """End a session. Its KV stays until memory is needed.

        A pass that runs writes only behind the rows that count, so the slot may be acquired at once.
        """
        member = self.pop(key, None)
        if member is not None:
            if member.relay is not None:
                del self.relays[member.relay.id]
                member.relay.dismiss(UPSTREAM_ENDED)
            self._give_back(key, member)
            self._changed.set()  # there may be memory for another session

    def replace_engine(self, engine: Engine) -> None:
        """Drafts with another engine of the same shape from the next level on. Sessions read their texts again."""
        self._next_engine = engine
        self._changed.set()

    def take_engine(self) -> bool:
        """Installs the new engine, if one is set, and return whether. No pass may run. Slots hold no KV of it."""
        if self._next_engine is None:
            return False
        engine, self._next_engine = self._next_engine, None
        self._executor.replace_engine(engine)
        self.slots.clear()
        self.budget = PageBudget(engine, self.slots)
        for member in self.values():
            member.fits = None
            self._drop_kv(member)
        return True

    def catch_up(self, key: Attachment, member: ScheduledSession) -> None:
        """Apply the upstream's messages, and the grammar, as soon as that is compiled."""
        self._apply_inbox(key, member)
        if member.session is not None:
            self._follow_grammar(key, member.session)

    def follow_adapter(self, key: Attachment, member: ScheduledSession) -> None:
        """Have a session begin anew with the model's own adapter, as soon as that is loaded."""
        session = member.session
        if session is not None and member.adapter is None and session.contract.adapter is not None:
            adapter, _ = self._adapter_of(key, session.contract)
            if adapter is not None:
                member.inbox.appendleft(session.snapshot())

    def reserve(
        self, session: DrafterSession, segment: Segment, behind: Sequence[tuple[Attachment, ScheduledSession]]
    ) -> bool:
        """Return whether there is memory for a session's next segment and all of its text. Preempt sessions `behind` it
        as far as needed: the first session in line always drafts.
        """
        if not self.budget.bounded:
            return True
        self._executor.run_queued()
        grown = MOST_LEVELS * LEVEL_ROWS if self._executor.engine.grows_trees else 0
        end = max(segment.prefix + segment.span + grown, len(session.tokens))
        return self.budget.reserve(session.slot, session.cached, end, self._preemptions(behind))

    def _preemptions(self, behind: Sequence[tuple[Attachment, ScheduledSession]]) -> Iterator[ScheduledSession]:
        """Yield sessions whose KV was released, from the last one on; they read their texts again later."""
        for _, member in reversed(behind):
            if member.session is not None and member.session.cached:
                self.preempted += 1
                self._drop_kv(member)
                self.slots.mark_computed(member.kv_slot.slot, 0)
                self._executor.engine.release(member.kv_slot.slot, 0)
                yield member

    def _drop_kv(self, member: ScheduledSession) -> None:
        """Drop a session's KV; the nodes that it has sent stay valid at the upstream."""
        member.kv_slot, member.next = AcquiredSlot(member.kv_slot.slot, 0, None), None
        if member.session is not None and not member.session.drop_kv():
            member.inbox.appendleft(member.session.snapshot())

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
            contract.adapter, self._executor.engine, partial(loop.call_soon_threadsafe, self._changed.set)
        )
        return adapter, key.tenant if adapter is None else contract.kv_scope(key.tenant)

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
            member.close_grammar()
            member.session = member.next = None
            member.kv_slot = AcquiredSlot(member.kv_slot.slot, 0, None)  # the slot's contents are unknown now
            self.slots.mark_computed(member.kv_slot.slot, 0)
            member.inbox.clear()
            self._resync(key)

    def _begin(self, key: Attachment, member: ScheduledSession, snapshot: MirrorSnapshot) -> DrafterSession:
        """Return a session over a snapshot, whose text may be shorter than before; KV that is still valid is kept."""
        replaced, engine = member.session, self._executor.engine
        if replaced is not None:
            self._give_back(key, member)
            member.adapter, member.kv_scope = self._adapter_of(key, snapshot.contract)
            member.kv_slot = self._acquire_slot(key, snapshot, member.kv_scope)
        if snapshot.features is not None:
            first = len(snapshot.tokens) - len(snapshot.features)
            self._executor.enqueue(partial(engine.feed, member.kv_slot.slot, first, snapshot.features, restart=True))
        return self._kinds.begin(snapshot, engine, member.kv_slot, replaced)

    def _acquire_slot(self, key: Attachment, snapshot: MirrorSnapshot, scope: str) -> AcquiredSlot:
        kv_slot = self.slots.acquire(snapshot.tokens, scope, key.session_id)
        self._executor.prepare_slot(kv_slot)
        return kv_slot

    def _give_back(self, key: Attachment, member: ScheduledSession) -> None:
        member.close_grammar()
        held = member.session.tokens[: member.session.cached] if member.session else []
        self.slots.release(member.kv_slot.slot, held, member.kv_scope, key.session_id)
        self._executor.release(member.kv_slot.slot, len(held))

    def _relay(self, key: Attachment, member: ScheduledSession, session: DrafterSession) -> None:
        """Open the session for the lower tier, or restart it there."""
        if member.relay is not None:
            member.relay.restart(session)
            return
        member.relay = Relay(key, session, self._sender, partial(self._forward_up, key, member))
        self.relays[key.session_id] = member.relay
        if self._lower_tier is not None:
            self._lower_tier.subscribe_waiting(member.relay)

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
                    partial(self._executor.engine.feed, session.slot, update.position, update.features, restart=False)
                )
        dropped = session.apply_terms(update)
        if session.tree.digest != update.digest:
            return False
        if relay is not None:
            self._sender.report_dropped(relay.owners(dropped))
            relay.publish(update.position, update.tokens, time.monotonic())
        return True
