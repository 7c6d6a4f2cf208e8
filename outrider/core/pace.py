"""When the verifier holds a step back for its drafters, and how they work meanwhile."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Protocol

from outrider.core.budget import Budget, CostModel
from outrider.core.contract import Plan
from outrider.core.waiting import Arrivals, Patterns, patience
from outrider.core.ways import Rivals, Way

_MOST_RATE = 2**32 - 1  # that a report has room for
FOLLOWING = 0.05  # how far the average of open sessions follows one step


class Paced(Protocol):
    """What is asked of a session."""

    plan: Plan
    committed_at: float  # when its last commit went out
    arrivals: Arrivals

    @property
    def greedy(self) -> bool:
        """Whether its text is."""

    @property
    def ahead(self) -> bool:
        """Whether its drafters go on while steps run."""

    @property
    def awaited(self) -> bool:
        """Whether they may still send something that a step could take."""

    @property
    def lacking(self) -> bool:
        """Whether no step may begin, by its plan, before they do."""


class Pace:
    """Learns from every step of a loop what waiting for drafters is worth, and what their work costs.

    Where drafters compute on the verifier's own cores, every level takes time from the steps; where they are far away,
    a step must not wait for them; and with many sessions a step is long without them. So how they had better work is
    measured, by how many sessions are open, and whether one that is alone is greedy.
    """

    def __init__(self, cost: CostModel) -> None:
        self.way = Way.TURNS  # the one to follow now
        self._cost = cost
        self._open = 0.0  # sessions, on average: drafters that begin read what they missed, so it must not flap
        self._patterns: dict[bool, Patterns] = {}  # by whether a session is greedy: drafters guess better what it says
        self._rivals: dict[tuple[int, bool], Rivals] = {}  # by the logarithm of the number; whether one alone is greedy
        self._latest: Rivals | None = None  # those that learned from the last step

    def patterns(self, *, greedy: bool) -> Patterns:
        """What deltas bring to sessions like this."""
        return self._patterns.setdefault(greedy, Patterns.unknown())

    def patience(self, sessions: Sequence[Paced], budget: Budget, now: float) -> float:
        """Seconds to hold a step back; 0 unless the deltas that are coming are worth the time of all its sessions.

        Several sessions that are drafted ahead for are not held back: their deltas come while steps run.
        """
        ahead = any(session.ahead for session in sessions)
        group = [session for session in sessions if session.awaited]
        lacking = [session for session in group if session.lacking]
        if lacking:
            return max(_left(session, now) for session in lacking)
        if not group or (ahead and len(sessions) > 1):
            return 0.0
        left = min(_left(session, now) for session in group)
        arrivals = [session.arrivals for session in group]
        return min(left, patience(arrivals, now, budget.expected, budget.seconds, judged=not ahead))

    def learn(self, sessions: Collection[Paced], decoding: int, read: int, committed: int, seconds: float) -> None:
        """With these sessions open, a step read so many tokens of prompts, and committed so many for those that were
        decoding, `seconds` after the step before."""
        self._open += (len(sessions) - self._open) * (FOLLOWING if self._open else 1.0)
        size = round(math.log2(max(1.0, self._open)))
        rivals = self._rivals_of(size, size == 0 and all(session.greedy for session in sessions))
        rivals.observe(self._cost.in_tokens(decoding, read) + committed, seconds)
        self.way, self._latest = rivals.way, rivals

    @property
    def rates(self) -> tuple[int, int]:
        """Thousandths of a token a second, of all sessions, while drafters rest and while they draft; 0: not measured
        with so many sessions, or drafters do not rest because of it."""
        plain, drafted = (0.0, 0.0) if self._latest is None else self._latest.rates
        return min(_MOST_RATE, round(plain * 1000)), min(_MOST_RATE, round(drafted * 1000))

    def _rivals_of(self, size: int, greedy: bool) -> Rivals:
        """New ones believe at first what is known of the nearest other number of sessions."""
        rivals = self._rivals.get((size, greedy))
        if rivals is None:
            others = [known for known in self._rivals if known[0] != size]
            nearest = min(others, key=lambda known: abs(known[0] - size), default=None)
            rivals = Rivals(Way.TURNS) if nearest is None else self._rivals[nearest].inherited()
            self._rivals[size, greedy] = rivals
        return rivals

    def forget(self) -> None:
        """Other drafters than those that were measured have come."""
        self._rivals.clear()
        self._latest = None


def _left(session: Paced, now: float) -> float:
    """Seconds for which its plan still allows a step to be held back."""
    return session.plan.wait_us * 1e-6 - (now - session.committed_at)
