"""Applies a governor's arm to the sessions of a verifier, and gives the governor what each of their steps did."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from outrider.core.control.arms.arm import OverlapMode, StepOutcome, VerifierLoad
from outrider.core.control.arms.governor import Governor
from outrider.core.control.arms.load_governor import GOVERNOR
from outrider.core.control.cost.budget import CostModel
from outrider.core.control.cost.plain_pace import StepWork
from outrider.core.control.drafting_terms import DraftingTerms
from outrider.core.session.contract import PlanOverlap
from outrider.core.stats import QUICK, Ema, FadingRatio

MAX_RATE = 2**32 - 1  # largest rate that fits the report's field, in thousandths of a token per second


class SteeredSession(Protocol):
    """What steering uses of a session."""

    terms: DraftingTerms

    @property
    def greedy(self) -> bool:
        """Whether the session decodes greedily."""

    @property
    def representative(self) -> bool:
        """Whether other sessions may learn from this one."""

    @property
    def drafting(self) -> bool:
        """Whether the session has a drafter."""


SessionT = TypeVar("SessionT", bound=SteeredSession)


class SessionTokens(NamedTuple):
    """What a step committed for one session."""

    session: SteeredSession
    tokens: int
    expected: float  # tokens that the calibrated scores of the verified nodes promised


class Steering:
    """Which of a verifier's sessions are drafted for, and in which mode."""

    def __init__(self, governor: Governor, cost: CostModel) -> None:
        self.governor = governor
        self._cost = cost
        self._rate = FadingRatio(QUICK)  # tokens per second of all sessions, prompts at their decode equivalent
        self._applied = 0  # sessions whose modes were set last
        self._eligible: list[SteeredSession] = []  # of these, those that may be drafted for
        self._drafted: list[SteeredSession] = []  # of these, those that are
        self._open = Ema(GOVERNOR.open_weight)
        self._greedy = Ema(GOVERNOR.open_weight)  # share of them
        self._load = VerifierLoad(0, greedy=False, representative=True)

    @property
    def overlap_mode(self) -> OverlapMode:
        """The mode of the sessions that are drafted for."""
        return self.governor.arm.mode

    def on_opened(self, sessions: Collection[SteeredSession]) -> None:
        """Take account of a session that was opened; `sessions` are all that are open."""
        self._follow_load(sessions)
        self.governor.begin(self._load)
        self.apply(sessions)

    def on_step(
        self, sessions: Collection[SteeredSession], commits: Sequence[SessionTokens], read: int, seconds: float
    ) -> None:
        """Record a step that read `read` prompt tokens and made `commits`, `seconds` after the step before; `sessions`
        are those that are open. Choose the arm for the next step.

        Only representative sessions count, if there are any: the others count as if they had done as well.
        """
        done = sum(it.tokens for it in commits) + self._cost.in_tokens(len(commits), read)
        self._rate.observe(done, seconds)
        if any(_forced(commit.session) for commit in commits):
            return  # their plans forbid plain decoding, so the step shows nothing of an arm
        self._follow_load(sessions)
        counted = [it for it in commits if it.session.representative or not self._load.representative]
        if commits and not counted:
            return
        scale = len(commits) / len(counted) if counted else 0.0
        drafting = sum(it.drafting and not it.terms.resting for it in self._eligible)
        work = StepWork(len(commits), read, scale * sum(it.tokens for it in counted))
        expected = scale * sum(it.expected for it in counted)
        before = self.governor.arm
        self.governor.observe(self._load, StepOutcome(work, expected, seconds, len(self._eligible), drafting))
        if self.governor.arm != before or len(sessions) != self._applied:
            self.apply(sessions)
        hold_tokens_per_s = self._rate.ratio / max(1, len(self._drafted))  # a hold delays all, for those drafted for
        for session in self._drafted:
            session.terms.hold_tokens_per_s = hold_tokens_per_s

    def on_unmeasured_step(self, sessions: Collection[SteeredSession]) -> None:
        """Take account of a step before which the verifier had nothing to do: its time shows nothing."""
        before = self.governor.arm
        self._follow_load(sessions)
        self.governor.pass_over(self._load)
        if self.governor.arm != before:
            self.apply(sessions)

    def apply(self, sessions: Collection[SteeredSession]) -> None:
        """Set the mode of all sessions, after the arm, a plan or the sessions have changed. Those that were drafted for
        stay so, as far as the share allows."""
        self._applied = len(sessions)
        self._eligible = [session for session in sessions if _eligible(session)]
        self._drafted = [*_first(self._eligible, self.governor.arm.drafted(len(self._eligible)))]
        drafted = {id(session) for session in self._drafted}
        for session in sessions:
            rests = id(session) not in drafted and not _forced(session)
            session.terms.set_overlap_mode(OverlapMode.REST if rests else self.governor.arm.mode)

    def rates(self) -> tuple[int, int]:
        """Return the rates of all sessions without and with drafting, in thousandths of a token per second; 0 where
        they were not compared."""
        plain, drafted = self.governor.rates(self._sessions)
        return min(MAX_RATE, round(plain * 1000)), min(MAX_RATE, round(drafted * 1000))

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all sessions over the last steps, prompts at their decode equivalent: lambda."""
        return self._rate.ratio

    def attributes(self, session: SteeredSession) -> dict[str, str | float]:
        """Return what the span of a session's step shows of control."""
        governor = self.governor
        return {
            "outrider.overlap_mode": session.terms.overlap_mode.value,
            "outrider.arm": str(governor.arm),
            "outrider.arm.reason": governor.reason,
            "outrider.tokens_per_s": self.tokens_per_s,
            "outrider.delay_budget": governor.budget.left_s,
        }

    def plain(self) -> tuple[float, float]:
        """Return the tokens per second that plain decoding would commit for as many sessions, and its relative
        error."""
        pace, work = self.governor.pace, StepWork(self._sessions, 0, self._sessions)
        return pace.tokens_per_s(self._sessions), 1.0 - pace.least_seconds(work) / pace.seconds(work)

    def estimates(self) -> dict[str, Any]:
        """Return what is steered by."""
        return {"open_sessions": self._open.mean, "tokens_per_s": self.tokens_per_s, **self.governor.estimates()}

    @property
    def _sessions(self) -> int:
        return max(1, round(self._open.mean))

    def _follow_load(self, sessions: Collection[SteeredSession]) -> None:
        """Follow the number and the kind of open sessions: at once where the number has nearly doubled, else smoothly.
        A caller that sends one request after another leaves short gaps."""
        count = max(1, len(sessions))
        if math.log2(count / max(self._open.mean, 0.1)) > GOVERNOR.sticky:
            self._open, self._greedy = Ema(GOVERNOR.open_weight), Ema(GOVERNOR.open_weight)
        self._open.observe(count)
        exact = math.log2(max(1.0, self._open.mean))
        size = self._load.size if abs(exact - self._load.size) < GOVERNOR.sticky else round(exact)
        if not sessions:
            self._load = self._load._replace(size=size)  # of the kind of the last ones
            return
        share = sum(session.greedy for session in sessions) / count
        self._greedy.observe(share)
        greedy = share == 1.0 if size == 0 else self._greedy.mean > GOVERNOR.greedy[self._load.greedy]
        self._load = VerifierLoad(size, greedy, any(session.representative for session in sessions))


def _eligible(session: SteeredSession) -> bool:
    """Return whether the session may be drafted for, or not, as the arm wants it."""
    return session.terms.plan.depth > 0 and not _forced(session)


def _forced(session: SteeredSession) -> bool:
    """Return whether the session's plan decides how its drafters work."""
    return session.terms.plan.depth > 0 and session.terms.plan.overlap in (PlanOverlap.ALWAYS, PlanOverlap.ROUNDS)


def _first(sessions: Sequence[SessionT], wanted: int) -> Iterator[SessionT]:
    """Yield `wanted` sessions, first those that are drafted for now."""
    drafted = [session for session in sessions if not session.terms.resting]
    yield from drafted[:wanted]
    resting = (session for session in sessions if session.terms.resting)
    for _, session in zip(range(wanted - len(drafted)), resting, strict=False):
        yield session
