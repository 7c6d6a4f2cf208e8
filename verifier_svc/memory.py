"""Which sessions may step, where there is less memory for KV than all of them together could take.

Sessions stand in the order in which they were opened. Where memory runs out, KV of sessions that have ended goes first,
the least recently used of it; then that of the session that was opened last, which reads its text again when there is
room for all of it. So a generation waits, and never fails, and the first in line always goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from outrider.engine.engine import Engine
from outrider.engine.passes import Passes
from outrider.engine.slots import Slots
from verifier_svc.session import Reading, Session

PAGE = 16  # rows
SPARE = 2  # pages of each session: the first that it writes to, and the first that accepted rows move to, may be shared

log = logging.getLogger(__name__)


class Memory:
    """Of one engine."""

    def __init__(self, engine: Engine, passes: Passes, slots: Slots, nodes: int) -> None:
        """`nodes`: of the trees in one step, at most."""
        self.preempted = 0  # how often a session's KV was let go
        self._engine = engine
        self._passes = passes
        self._slots = slots
        self._trees = nodes // PAGE + SPARE  # pages
        self._bounded = engine.memory(0, 0, 0) is not None

    def seated(self, sessions: Iterable[Session]) -> list[Session]:
        """Those that are ready, and for whose next step there is memory. No pass may run.

        Who has yet to read is not begun with before there is room for the whole text, and nobody behind it either.
        """
        if not self._bounded:
            return [session for session in sessions if session.ready]
        self._passes.settle()
        line = sorted(sessions, key=_last)
        seated: list[Session] = []
        promised, full = self._trees, False
        for place, session in enumerate(line):
            reads = session.unread > 1
            if not session.ready or (reads and full):
                continue
            needed = self._make_room(session, () if reads and place else line[place + 1 :], promised)
            if needed is None:
                full = full or reads
            else:
                promised += needed
                seated.append(session)
        return seated

    def _make_room(self, session: Session, behind: Sequence[Session], promised: int) -> int | None:
        """Pages that its text takes, once they are free beside those that are promised; None: they cannot be, though
        those behind it let theirs go."""
        slot = session.place.slot
        while True:
            memory = self._engine.memory(slot, session.cached, min(len(session.tokens) + 1, self._engine.rows))
            assert memory is not None
            needed, free = memory[0] + SPARE, memory[1]
            if promised + needed <= free:
                return needed
            evicted = self._slots.evict()
            if evicted is not None:
                self._engine.release(evicted, 0)
                continue
            victim = next((other for other in reversed(behind) if other.cached), None)
            if victim is None:
                return None
            self._preempt(victim)

    def _preempt(self, session: Session) -> None:
        self.preempted += 1
        log.info("session %s waits: there is no memory for the KV of its %d tokens", session.id, len(session.tokens))
        session.cached = 0
        self._slots.computed(session.place.slot, 0)
        self._engine.release(session.place.slot, 0)


def _last(session: Session) -> bool:
    """Texts that are only read come last."""
    return isinstance(session, Reading)
