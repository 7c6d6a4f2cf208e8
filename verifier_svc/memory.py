"""Which sessions may step, where there is less memory for KV than all of them together could take.

Sessions stand in the order in which they were opened. Where memory runs out, KV of sessions that have ended goes first,
the least recently used of it; then that of the session that was opened last, which reads its text again when there is
room for all of it. So a generation waits, and never fails, and the first in line always goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from outrider.engine.engine import PAGE, Engine
from outrider.engine.page_budget import SPARE, PageBudget
from outrider.engine.passes import Passes
from outrider.engine.slots import Slots
from verifier_svc.session import Reading, Session

log = logging.getLogger(__name__)


class Memory:
    """Of one engine."""

    def __init__(self, engine: Engine, passes: Passes, slots: Slots, nodes: int) -> None:
        """`nodes`: of the trees in one step, at most."""
        self.preempted = 0  # how often a session's KV was let go
        self._engine = engine
        self._passes = passes
        self._slots = slots
        self._budget = PageBudget(engine, slots)
        self._trees = nodes // PAGE + SPARE  # pages

    def seated(self, sessions: Iterable[Session]) -> list[Session]:
        """Those that are ready, and for whose next step there is memory. No pass may run.

        Who has yet to read is not begun with before there is room for the whole text, and nobody behind it either.
        """
        if not self._budget.bounded:
            return [session for session in sessions if session.ready]
        self._passes.settle()
        self._budget.open(self._trees)
        line = sorted(sessions, key=_last)
        seated: list[Session] = []
        full = False
        for place, session in enumerate(line):
            reads = session.unread > 1
            if not session.ready or (reads and full):
                continue
            behind = () if reads and place else line[place + 1 :]
            if self._budget.reserve(
                session.place.slot, session.cached, len(session.tokens) + 1, self._preemptions(behind)
            ):
                seated.append(session)
            else:
                full = full or reads
        return seated

    def _preemptions(self, behind: Sequence[Session]) -> Iterator[Session]:
        """Lets the KV of one after the other go, from the last on."""
        for session in reversed(behind):
            if session.cached:
                self._preempt(session)
                yield session

    def _preempt(self, session: Session) -> None:
        self.preempted += 1
        log.info("session %s waits: there is no memory for the KV of its %d tokens", session.id, len(session.tokens))
        session.cached = 0
        self._slots.computed(session.place.slot, 0)
        self._engine.release(session.place.slot, 0)


def _last(session: Session) -> bool:
    """Texts that are only read come last."""
    return isinstance(session, Reading)
