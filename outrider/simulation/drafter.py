"""A simulated drafter."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from outrider.core.ways import Way
from outrider.simulation.session import Drafted, Session

if TYPE_CHECKING:
    from outrider.simulation.cluster import Cluster


class Drafter:
    """Drafts a level at a time for all sessions that want one."""

    def __init__(self, cluster: Cluster) -> None:
        self.sessions: set[Session] = set()
        self._cluster = cluster
        self._drafts: dict[Session, tuple[int, Drafted]] = {}  # what it knows to be committed, and its draft
        self._running = False

    def told(self, session: Session, position: int) -> None:
        """Of a commit."""
        if session not in self.sessions:
            return
        _, drafted = self._drafts.get(session, (0, Drafted(0, 0)))
        if not session.below(drafted, position):
            drafted = Drafted(position, position)
        self._drafts[session] = position, drafted
        self._start()

    def forget(self, session: Session) -> None:
        """It drafts for others now."""
        self.sessions.discard(session)
        self._drafts.pop(session, None)

    def _start(self) -> None:
        turn = {it: drafted for it, (known, drafted) in self._drafts.items() if self._may(it, known, drafted)}
        if self._running or not turn:
            return
        deployment = self._cluster.deployment
        seconds = (deployment.level_ms + (len(turn) - 1) * deployment.level_more_ms) / 1e3
        waited_for = [it for it in turn if not (it.ahead or it.rounds)]
        gain = sum(it.gain(turn[it].end - self._drafts[it][0]) for it in waited_for)
        if waited_for and gain < seconds * sum(it.speed.per_second for it in waited_for):
            for it in waited_for:  # the price of time: the level is not worth what it holds up
                self._cluster.clock.after(self._cluster.one_way(), self._exhaustion(it, self._drafts[it][0]))
            return
        self._running = True
        self._cluster.outcome.drafting += seconds
        self._cluster.clock.after(seconds, lambda: self._done(turn))

    @staticmethod
    def _may(session: Session, known: int, drafted: Drafted) -> bool:
        """Whether it grows that session's tree now."""
        if session.way is Way.REST or drafted.end - known >= session.plan.depth:
            return False
        return session.ahead or not (session.passing and known == session.position)

    def _done(self, turn: dict[Session, Drafted]) -> None:
        self._running = False
        for session, drafted in turn.items():
            known, now = self._drafts.get(session, (0, None))
            if now == drafted:
                longer = drafted._replace(end=drafted.end + 1)
                self._drafts[session] = known, longer
                self._cluster.clock.after(self._cluster.one_way(), self._arrival(session, longer))
        self._start()

    def _exhaustion(self, session: Session, known: int) -> Callable[[], None]:
        return lambda: self._cluster.verifier_of(session).exhausted(session, known)

    def _arrival(self, session: Session, drafted: Drafted) -> Callable[[], None]:
        return lambda: self._cluster.verifier_of(session).grown(session, drafted)
