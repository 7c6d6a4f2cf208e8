"""When the verifier holds a step back for its drafters. See docs/control.md, "Holds"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from outrider.core.control.cost.budget import VerificationBudget
from outrider.core.control.drafting_terms import DraftingTerms
from outrider.core.control.holds.arrival_model import ArrivalPatterns, Arrivals, hold_seconds


class HeldSession(Protocol):
    """What the hold policy uses of a session."""

    terms: DraftingTerms
    arrivals: Arrivals

    @property
    def greedy(self) -> bool:
        """Whether the session decodes greedily."""

    @property
    def awaited(self) -> bool:
        """Whether the session's drafters may still send nodes that a step could take."""

    @property
    def awaiting_depth(self) -> bool:
        """Whether the session's plan forbids a step before its tree is deeper."""


SessionT = TypeVar("SessionT", bound=HeldSession)


class HoldPolicy:
    """Learns from the deltas of all sessions when they come and what they bring, and holds a step back where that
    pays. All times are in seconds."""

    def __init__(self) -> None:
        self._patterns: dict[bool, ArrivalPatterns] = {}  # by whether a session is greedy: drafters do better there

    def patterns(self, *, greedy: bool) -> ArrivalPatterns:
        """Return the arrival patterns that greedy, or other, sessions share."""
        return self._patterns.setdefault(greedy, ArrivalPatterns())

    def required_hold(self, sessions: Sequence[SessionT], now: float) -> tuple[SessionT | None, float]:
        """Return the first session whose plan still forbids a step, and the seconds for which it does; None and 0 if
        there is none."""
        for session in sessions:
            if session.awaited and session.awaiting_depth and (left := _left(session, now)) > 0.0:
                return session, left
        return None, 0.0

    def hold_seconds(
        self, sessions: Sequence[HeldSession], budget: VerificationBudget, now: float, tokens_per_s: float
    ) -> float:
        """Return the seconds for which to hold a step back; 0 unless the expected deltas are worth the time of all its
        sessions: they must bring more tokens than the step does in that time, and than the verifier has lately,
        `tokens_per_s`.

        No step is held back in the mode AHEAD: its deltas arrive while steps run.
        """
        group = [session for session in sessions if session.awaited]
        awaiting = [session for session in group if session.awaiting_depth]
        if awaiting:
            return max(_left(session, now) for session in awaiting)
        if not group or any(session.terms.ahead for session in sessions):
            return 0.0
        rate = max(tokens_per_s, budget.expected / budget.seconds)
        group = [session for session in group if not session.arrivals.later(now, budget.seconds, rate)]
        if not group:
            return 0.0
        left = min(_left(session, now) for session in group)
        return min(left, hold_seconds([session.arrivals for session in group], now, budget.seconds, rate))

    def estimates(self) -> dict[str, Any]:
        """Return what is expected after a commit, of greedy and of other sessions."""
        kinds = {False: "sampled", True: "greedy"}
        return {kinds[greedy]: patterns.estimates() for greedy, patterns in tuple(self._patterns.items())}


def _left(session: HeldSession, now: float) -> float:
    """Return the seconds for which the session's plan still allows a step to be held back."""
    return session.terms.plan.wait_us * 1e-6 - (now - session.terms.committed_at)
