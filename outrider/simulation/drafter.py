"""A simulated drafter, which drafts level by level."""

from __future__ import annotations

from collections.abc import Callable

from outrider.simulation.session import SimulatedDraft, SimulatedSession, SimulationEnvironment

FEW = 16  # committed tokens that a level's pass reads beside


class SimulatedDrafter:
    """Drafts one level at a time for all sessions that need one."""

    def __init__(self, cluster: SimulationEnvironment) -> None:
        self.sessions: set[SimulatedSession] = set()
        self._cluster = cluster
        self._drafts: dict[
            SimulatedSession, tuple[int, SimulatedDraft]
        ] = {}  # the number of committed tokens that the drafter has received, and its draft
        self._read: dict[SimulatedSession, int] = {}  # tokens of the text that it has read
        self._running = False

    def on_commit(self, session: SimulatedSession, position: int) -> None:
        """Receive a commit, after which `position` tokens are committed."""
        if session not in self.sessions:
            return
        _, drafted = self._drafts.get(session, (0, SimulatedDraft(0, 0)))
        if not session.below(drafted, position):
            drafted = SimulatedDraft(position, position)
        self._drafts[session] = position, drafted
        self._start()

    def forget(self, session: SimulatedSession) -> None:
        """Stop drafting for a session."""
        self.sessions.discard(session)
        self._drafts.pop(session, None)
        self._read.pop(session, None)

    def _start(self) -> None:
        turn = {it: drafted for it, (known, drafted) in self._drafts.items() if self._may(it, known, drafted)}
        if self._running or not turn:
            return
        deployment = self._cluster.deployment
        seconds = (deployment.level_ms + (len(turn) - 1) * deployment.level_more_ms) / 1e3
        reading = sum(self._missed(it) for it in turn) * deployment.read_ms / 1e3
        waited_for = [it for it in turn if not (it.terms.ahead or it.terms.rounds)]
        gain = sum(it.gain(turn[it].end - self._drafts[it][0]) for it in waited_for)
        if waited_for and gain < seconds * sum(it.terms.time_cost_tokens_per_s for it in waited_for):
            for it in waited_for:  # the level is not worth the time for which it holds steps
                self._cluster.clock.after(self._cluster.one_way(), self._exhaustion(it, self._drafts[it][0]))
            return
        self._running = True
        seconds += reading
        self._read.update((it, it.kind.prompt + self._drafts[it][0]) for it in turn)
        self._cluster.outcome.drafting += seconds
        self._cluster.clock.after(seconds, lambda: self._done(turn))

    def _missed(self, session: SimulatedSession) -> int:
        """Return the tokens to read before the next level, unless they are few: these are rows of its pass."""
        missed = session.kind.prompt + self._drafts[session][0] - self._read.get(session, 0)
        return missed if missed > FEW else 0

    @staticmethod
    def _may(session: SimulatedSession, known: int, drafted: SimulatedDraft) -> bool:
        """Return whether the drafter may draft another level for the session now."""
        if session.terms.resting or drafted.end - known >= session.terms.plan.depth:
            return False
        passing = session.passing and known == session.position and not session.arrivals.starting
        return session.terms.ahead or not passing

    def _done(self, turn: dict[SimulatedSession, SimulatedDraft]) -> None:
        self._running = False
        for session, drafted in turn.items():
            known, now = self._drafts.get(session, (0, None))
            if now == drafted:
                longer = drafted._replace(end=drafted.end + 1)
                self._drafts[session] = known, longer
                self._cluster.clock.after(self._cluster.one_way(), self._arrival(session, longer))
        self._start()

    def _exhaustion(self, session: SimulatedSession, known: int) -> Callable[[], None]:
        return lambda: self._cluster.verifier_of(session).on_exhausted(session, known)

    def _arrival(self, session: SimulatedSession, drafted: SimulatedDraft) -> Callable[[], None]:
        return lambda: self._cluster.verifier_of(session).on_level(session, drafted)
