"""When the verifier holds a step back for its drafters, and when it lets them rest."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.budget import OVERHEAD_S, Budget, CostModel
from outrider.core.waiting import Patterns, Speed, patience, pays
from verifier_svc.session import Session

PROOF = 24  # steps that show how fast so many sessions are with drafting; a third of it, without


class Pace:
    """Learns from every step of a loop what waiting for drafters is worth, and what their work costs."""

    def __init__(self, cost: CostModel) -> None:
        self.patterns = Patterns.unknown()
        self._cost = cost
        self._trial = False  # whether the next step is not worth a wait, so that one could only be a trial
        self._speeds: dict[tuple[int, bool], Speed] = {}  # by the number of sessions, and whether drafters are muted

    def patience(self, sessions: Sequence[Session], budget: Budget, now: float) -> float:
        """Seconds to hold a step back; 0 unless the deltas that are coming are worth the time of all its sessions.

        Several sessions with overlap are not held back: their deltas come while steps run.
        """
        overlap = any(session.plan.overlap for session in sessions)
        group = [session for session in sessions if session.awaited]
        if not group or (overlap and len(sessions) > 1):
            return 0.0
        left = min(session.plan.wait_us * 1e-6 - (now - session.committed_at) for session in group)
        arrivals = [session.arrivals for session in group]
        return min(
            left, patience(arrivals, now, budget.expected, budget.seconds, judged=not overlap, trial=self._trial)
        )

    def learn(self, sessions: Sequence[Session], tokens: int, seconds: float) -> None:
        """A step committed `tokens`, `seconds` after the one before: how fast are drafters at work, or muted?"""
        muted = {session.muted for session in sessions}
        if len(muted) == 1 and all(session.drafting and not session.plan.overlap for session in sessions):
            self._speeds.setdefault((len(sessions), muted.pop()), Speed()).observe(tokens, seconds)

    def mute(self, sessions: Sequence[Session], now: float) -> None:
        """Among several sessions without overlap, drafting that no step waits for only takes time from the steps:
        drafters then are not told of commits until it pays again, or is tried."""
        group = [session for session in sessions if session.drafting and not session.plan.overlap]
        arrivals = [session.arrivals for session in group]
        expected = sum(session.worth() for session in sessions)
        seconds = self._cost.seconds(len(sessions)) + OVERHEAD_S
        drafting, muted = (self._speeds.get((len(sessions), muted), Speed()) for muted in (False, True))
        loses = drafting.steps >= PROOF and (
            muted.steps < PROOF // 3 or drafting.tokens_per_second < muted.tokens_per_second
        )
        self._trial = loses or not pays(arrivals, now, expected, seconds)
        for session in group:
            session.muted = len(sessions) > 1 and self._trial and not session.arrivals.due
