"""The sessions that are open on a verifier: each has a KV slot, from when it is opened until it is closed."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence

from outrider.core.session.contract import OFF, Contract
from outrider.core.session.digest import NOTHING, Prefix
from outrider.engine.executor import Executor
from outrider.engine.kv.kv_slots import KvSlots
from outrider.errors import Moved, Superseded
from verifier_svc.feature_store import FeatureFuser
from verifier_svc.proposers.head_proposer import HeadProposer
from verifier_svc.proposers.ngram_proposer import NgramProposers
from verifier_svc.session import PrefillSession, SessionStart, VerifierSession
from verifier_svc.steps.step_learning import StepLearning

SHUTTING_DOWN = "this verifier is going down; ask another one"
PREFILL = Contract(seed=0, max_tokens=1)  # of a text that is only prefilled


class OpenSessions(dict[str, VerifierSession]):
    """The open sessions by their ids, and the KV slots of an engine. Calls `wake` when a step may have other work."""

    def __init__(
        self,
        executor: Executor,
        ngram_proposers: NgramProposers,
        head_proposer: HeadProposer,
        feature_fuser: FeatureFuser,
        learning: StepLearning,
        wake: Callable[[], None],
    ) -> None:
        super().__init__()
        self.freed = asyncio.Event()  # set whenever a slot is released
        self.slots = KvSlots(executor.engine.slots, rewinds=executor.engine.rewinds and not executor.engine.treeless)
        self.opened = 0  # sessions, closed ones included
        self.in_pass: Sequence[VerifierSession] = ()  # sessions in the running pass
        self._executor = executor
        self._ngram_proposers = ngram_proposers
        self._head_proposer = head_proposer
        self._feature_fuser = feature_fuser
        self._learning = learning
        self._wake = wake
        self._drained: Callable[[], None] | None = None  # while going down: called once all sessions are closed
        self._stopped = False

    def open(self, start: SessionStart) -> VerifierSession:
        """Give a session a KV slot, if possible one that holds the KV of its first tokens.

        A session that is open under an older epoch is closed as fenced, and its KV stays for the new one. Raises
        Superseded for an epoch that is not newer, Overloaded when all slots are in use, Moved when this verifier is
        going down.
        """
        if self.draining:
            raise Moved(SHUTTING_DOWN)
        present = self.get(start.session_id)
        if present:
            if start.epoch <= present.epoch:
                raise Superseded(f"session {start.session_id} is owned under epoch {present.epoch}")
            present.commits.fenced = True
            self.close(present)
        most = None if start.scored is None else start.scored - 1  # the row before a token has its log-probability
        kv_slot = self.slots.acquire(start.tokens, start.kv_scope, start.session_id, most)
        self._executor.prepare_slot(kv_slot)
        proposer = self._ngram_proposers.begin(start.tenant, start.contract)
        heads = self._head_proposer.open(start.contract, kv_slot, self._executor)
        patterns = start.contract.own_or_shared(self._learning.hold_policy.patterns(greedy=start.contract.greedy))
        engine = self._executor.engine
        session = VerifierSession(
            start, kv_slot, engine.vocabulary, patterns, proposer, heads, unpadded_vocabulary=engine.unpadded_vocabulary
        )
        session.fused = self._feature_fuser.open(kv_slot, self._executor)
        if session.grammar is not None:
            session.grammar.on_change = self._wake
        self[session.id] = session
        self.opened += 1
        self._learning.steering.on_opened(self.values())
        self._wake()
        return session

    async def prefill(
        self,
        tokens: Sequence[int],
        tenant: str,
        known: Prefix = NOTHING,
        contract: Contract = PREFILL,
        adapter: object | None = None,
    ) -> int:
        """Prefill a text; its KV stays in a free slot. Return how many tokens have KV. Raises as `open`.

        `known`: the digest of a prefix of the tokens, as a token tree takes it; `contract`: PREFILL, with an adapter
        where the text has one; `adapter`: that as the engine has loaded it.
        """
        if self.draining:
            raise Moved(SHUTTING_DOWN)
        name = f"reading {secrets.token_hex(8)}"
        start = SessionStart(name, tenant, 0, tokens, len(tokens), contract, OFF, 1, known, adapter=adapter)
        kv_slot = self.slots.acquire(tokens, start.kv_scope)
        self._executor.prepare_slot(kv_slot)
        self._head_proposer.open(PREFILL, kv_slot, self._executor)
        self._feature_fuser.open(kv_slot, self._executor)
        session = PrefillSession(
            start, kv_slot, self._executor.engine.vocabulary, self._learning.hold_policy.patterns(greedy=True), None
        )
        self[session.id] = session
        self.opened += 1
        self._wake()
        try:
            if session.ready:
                await session.commits.get()
        finally:
            self.close(session)
        return session.cached

    def close(self, session: VerifierSession) -> None:
        """End a session: no new step starts for it, and its KV stays until memory is needed. Closing it again changes
        nothing.

        A pass that runs writes only behind the rows that count, so the slot may be acquired at once. Where the engine
        cannot take rows back, none of the slot's KV counts then.
        """
        if self.get(session.id) is not session:
            return
        del self[session.id]
        session.finished = True
        if session.grammar is not None:
            session.grammar.close()
        session.record_answer()
        session.commits.close()
        session.broadcast.close()
        lost = self._executor.engine.treeless and session in self.in_pass
        held = [] if lost else session.tokens[: session.cached]
        self.slots.release(session.kv_slot.slot, held, session.kv_scope, session.id)
        self._executor.release(session.kv_slot.slot, len(held))
        self.freed.set()
        self._wake()  # there may be memory for another session
        session.dismiss("fenced" if session.commits.fenced else "finished")

    @property
    def draining(self) -> bool:
        """Whether this verifier is going down."""
        return self._stopped or self._drained is not None

    def begin_drain(self, drained: Callable[[], None]) -> None:
        """Start no further step. After the running step, close all sessions as moved and call `drained`."""
        self._drained = drained
        self._wake()
        if self._stopped:
            drained()

    def close_due(self) -> None:
        """Close the sessions whose grammars can be followed no longer, and, once this verifier goes down, all."""
        for session in [*self.values()]:
            if session.grammar is not None and session.grammar.failure is not None:
                session.commits.failure = session.grammar.failure
                self.close(session)
        if self._drained is not None:
            self._close_all(self._drained)

    def stop(self) -> None:
        """Close all sessions as moved. None may be opened after it."""
        self._stopped = True
        self._close_all(self._drained or (lambda: None))

    def _close_all(self, drained: Callable[[], None]) -> None:
        for session in [*self.values()]:
            session.commits.moved = True
            self.close(session)
        drained()
