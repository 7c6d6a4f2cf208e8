"""When the verifier holds a step back for its drafters, and in which overlap mode drafters work.

See docs/performance.md, "Who waits for whom".
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from outrider.core.control.arrival_model import ArrivalPatterns, Arrivals, hold_seconds
from outrider.core.control.budget import CostModel, VerificationBudget
from outrider.core.control.drafting_terms import DraftingTerms
from outrider.core.control.overlap import OverlapMode, OverlapSelector
from outrider.core.stats import Ema

_MAX_RATE = 2**32 - 1  # largest rate that fits the report's field, in thousandths of a token per second
EMA_WEIGHT = 0.05  # weight of one step in the average number of open sessions


class HeldSession(Protocol):
    """What the hold policy uses of a session."""

    terms: DraftingTerms
    arrivals: Arrivals

    @property
    def greedy(self) -> bool:
        """Whether the session decodes greedily."""

    @property
    def representative(self) -> bool:
        """Whether other sessions may learn from this one."""

    @property
    def awaited(self) -> bool:
        """Whether the session's drafters may still send nodes that a step could take."""

    @property
    def awaiting_depth(self) -> bool:
        """Whether the session's plan forbids a step before its tree is deeper."""


SessionT = TypeVar("SessionT", bound=HeldSession)


class SessionMix(NamedTuple):
    """What overlap modes are measured for separately."""

    size: int  # the rounded log2 of the number of open sessions
    greedy: bool  # whether there is a single session, which is greedy
    representative: bool  # whether some session is representative, so that these alone are measured


class HoldPolicy:
    """Learns from every step of a verifier whether waiting for drafters pays, and which overlap mode is fastest.

    Where drafters compute on the verifier's own cores, every level takes time from the steps; where they are far away,
    a step must not wait for them; and with many sessions a step is long without them. So the overlap mode is measured,
    separately by the number of open sessions, and with a single session also by whether it is greedy. Only
    representative sessions are measured; while none is open the others are, in a measurement of their own. All times
    are in seconds.
    """

    def __init__(self, cost: CostModel) -> None:
        self.overlap_mode = OverlapMode.TURNS  # the mode to use now
        self._cost = cost
        self._open = Ema(
            EMA_WEIGHT
        )  # average number of open sessions; smooth, because drafters that start must first catch up
        self._patterns: dict[
            bool, ArrivalPatterns
        ] = {}  # by whether a session is greedy, because drafters predict greedy text better
        self._selectors: dict[SessionMix, OverlapSelector] = {}
        self._latest: OverlapSelector | None = None  # the one that learned from the last step

    def patterns(self, *, greedy: bool) -> ArrivalPatterns:
        """Return the arrival patterns that greedy, or other, sessions share."""
        return self._patterns.setdefault(greedy, ArrivalPatterns.unknown())

    def required_hold(self, sessions: Sequence[SessionT], now: float) -> tuple[SessionT | None, float]:
        """Return the first session whose plan still forbids a step, and the seconds for which it does; None and 0 if
        there is none."""
        for session in sessions:
            if session.awaited and session.awaiting_depth and (left := _left(session, now)) > 0.0:
                return session, left
        return None, 0.0

    def hold_seconds(self, sessions: Sequence[HeldSession], budget: VerificationBudget, now: float) -> float:
        """Return the seconds for which to hold a step back; 0 unless the expected deltas are worth the time of all its
        sessions.

        Several sessions in the mode AHEAD are not held back, because their deltas arrive while steps run.
        """
        ahead = any(session.terms.ahead for session in sessions)
        group = [session for session in sessions if session.awaited]
        awaiting = [session for session in group if session.awaiting_depth]
        if awaiting:
            return max(_left(session, now) for session in awaiting)
        if not group or (ahead and len(sessions) > 1):
            return 0.0
        left = min(_left(session, now) for session in group)
        arrivals = [session.arrivals for session in group]
        return min(left, hold_seconds(arrivals, now, budget.expected, budget.seconds, self_limiting=not ahead))

    def learn(
        self,
        sessions: Collection[HeldSession],
        commits: Sequence[tuple[HeldSession, int]],
        read: int,
        seconds: float,
    ) -> None:
        """Record a step with the open `sessions`, `seconds` after the step before, and choose the overlap mode.

        The step read `read` prompt tokens. `commits` are the sessions that decoded, each with the number of tokens that
        it committed.
        """
        self._open.observe(len(sessions))
        size = round(math.log2(max(1.0, self._open.mean)))
        representative = any(session.representative for session in sessions)
        counted = [tokens for session, tokens in commits if session.representative or not representative]
        if commits and not counted:
            return  # the step was that of sessions from which the present ones do not learn
        greedy = size == 0 and all(session.greedy for session in sessions)
        selector = self._selector_of(SessionMix(size, greedy, representative))
        selector.observe(self._cost.in_tokens(len(commits), read) + sum(counted), seconds)
        self.overlap_mode, self._latest = selector.arm, selector

    @property
    def rates(self) -> tuple[int, int]:
        """The rates of all sessions while drafters rest and while they draft, in thousandths of a token per second; 0
        where they were not measured with this number of sessions, or where they are not why drafters rest."""
        plain, drafted = (0.0, 0.0) if self._latest is None else self._latest.rates
        return min(_MAX_RATE, round(plain * 1000)), min(_MAX_RATE, round(drafted * 1000))

    def _selector_of(self, mix: SessionMix) -> OverlapSelector:
        """Return the selector for a mix of sessions. A new one starts from the selector of the nearest number of
        sessions, which is one of representative sessions, unless the new one is not."""
        selector = self._selectors.get(mix)
        if selector is None:
            fitting = [known for known in self._selectors if known.representative >= mix.representative]
            others = [known for known in fitting if known.size != mix.size]
            nearest = min(others, key=lambda known: abs(known.size - mix.size), default=None)
            selector = (
                OverlapSelector(OverlapMode.TURNS) if nearest is None else self._selectors[nearest].warm_started()
            )
            self._selectors[mix] = selector
        return selector

    def estimates(self) -> dict[str, Any]:
        """Return what is estimated of drafters and overlap modes."""
        return {
            "overlap_mode": self.overlap_mode.value,
            "open_sessions": self._open.mean,
            "arrivals": {_kind(greedy): patterns.estimates() for greedy, patterns in tuple(self._patterns.items())},
            "overlap_modes": [
                {
                    "sessions": 2**mix.size,
                    "kind": _kind(mix.greedy),
                    "representative": mix.representative,
                    **selector.estimates(),
                }
                for mix, selector in tuple(self._selectors.items())
            ],
        }

    def forget(self) -> None:
        """Forget all measurements of overlap modes, because other drafters have connected."""
        self._selectors.clear()
        self._latest = None


def _kind(greedy: bool) -> str:
    return "greedy" if greedy else "sampled"


def _left(session: HeldSession, now: float) -> float:
    """Return the seconds for which the session's plan still allows a step to be held back."""
    return session.terms.plan.wait_us * 1e-6 - (now - session.terms.committed_at)
