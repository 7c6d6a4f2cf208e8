"""Which sessions may step when there is less KV memory than all of them together could use.

Sessions are ordered by when they were opened. When memory runs out, KV of ended sessions goes first, the least recently
used before others; then KV of the session that was opened last, which reads its text again when there is room for all
of it. So a generation waits, and never fails, and the first session always goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from outrider.engine.executor import Executor
from outrider.engine.interface.engine import PAGE
from outrider.engine.kv.kv_slots import KvSlots
from outrider.engine.kv.page_budget import SPARE, PageBudget
from verifier_svc.session import PrefillSession, VerifierSession

log = logging.getLogger(__name__)


class KvMemory:
    """The KV memory of one engine."""

    def __init__(self, executor: Executor, slots: KvSlots, nodes: int) -> None:
        """`nodes`: of all trees in one step, at most."""
        self.preempted = 0  # how often a session's KV was released
        self._executor = executor
        self._slots = slots
        self._budget = PageBudget(executor.engine, slots)
        self._trees = nodes // PAGE + SPARE  # pages

    async def prepare(self) -> None:
        """Run the queued changes in the thread of the passes, if there are heads or features, whose copies are long:
        `schedulable` runs changes in the event loop's thread, which holds up all streams.
        """
        if self._budget.bounded and self._executor.engine.features is not None:
            await self._executor.flush()

    def schedulable(self, sessions: Iterable[VerifierSession]) -> list[VerifierSession]:
        """Return the sessions that are ready and for whose next step there is memory. No pass may run.

        A session that has yet to read its text starts only when there is room for the whole text, and no such session
        behind it starts earlier.
        """
        if not self._budget.bounded:
            return [session for session in sessions if session.ready]
        self._executor.run_queued()
        self._budget.open(self._trees)
        ordered = sorted(sessions, key=_last)
        schedulable: list[VerifierSession] = []
        full = False
        for index, session in enumerate(ordered):
            reads = session.unread > 1
            if not session.ready or (reads and full):
                continue
            behind = () if reads and index else ordered[index + 1 :]
            if self._budget.reserve(
                session.kv_slot.slot, session.cached, len(session.tokens) + 1, self._preemptions(behind)
            ):
                schedulable.append(session)
            else:
                full = full or reads
        return schedulable

    def _preemptions(self, behind: Sequence[VerifierSession]) -> Iterator[VerifierSession]:
        """Yield sessions whose KV was released, from the last one on."""
        for session in reversed(behind):
            if session.cached:
                self._preempt(session)
                yield session

    def _preempt(self, session: VerifierSession) -> None:
        self.preempted += 1
        log.info("session %s waits: there is no memory for the KV of its %d tokens", session.id, len(session.tokens))
        session.cached = 0
        self._slots.mark_computed(session.kv_slot.slot, 0)
        self._executor.engine.release(session.kv_slot.slot, 0)


def _last(session: VerifierSession) -> bool:
    """Sort key: texts that are only prefilled come last."""
    return isinstance(session, PrefillSession)
