"""Compares the ways of working of a verifier and its drafters under one load, and keeps the fastest.

See docs/control.md. Times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from outrider.core.control.arms.arm import MODES, PLAIN, Arm, OverlapMode, StepOutcome, VerifierLoad
from outrider.core.control.arms.delay_budget import DELAY, DelayBudget, Recovery
from outrider.core.control.trials import PairedDifference, PairedTrial, TrialSchedule
from outrider.core.stats import FadingRatio


@dataclass(frozen=True, slots=True)
class GovernorTuning:
    """How arms are compared, and loads are told apart."""

    denominators: tuple[int, ...] = (8, 4, 2, 1)  # shares of the sessions to draft for: 1/8 first
    opening: int = 8  # plain steps of a single session before it is drafted for, so that plain decoding's pace is known
    margin: float = math.log(1.01)  # log of the ratio by which an arm must beat plain decoding
    rest_s: float = 3.0  # pause after the usual arm changes before another mode is tried; before plain, four times that
    wait_s: float = 2.0  # longest wait for the drafters of a challenger
    retry_s: tuple[float, float] = (4.0, 120.0)  # pause before a beaten arm is tried again: at first, and at most
    settling: int = 2  # steps after a change that belong to no block: terms reach drafters with the next commit
    changing: int = 16  # at most this many steps are left out until the first drafts come, or the last have drained
    luck_prior: float = 50.0  # tokens that are assumed to be committed as expected at first
    open_weight: float = 0.05  # weight of one step in the averages: open sessions, and the share of greedy ones
    sticky: float = 0.65  # log2 by which open sessions may leave a load; a larger rise is followed at once
    greedy: tuple[float, float] = (0.9, 0.6)  # shares of greedy sessions: from where a load is, and to where it stays


GOVERNOR = GovernorTuning()


class LoadGovernor:
    """Compares arms with the usual one under one load, and keeps the fastest."""

    def __init__(self, load: VerifierLoad, hint: Arm = PLAIN, modes: Sequence[OverlapMode] = MODES) -> None:
        """`hint`: an arm to try first. A single session goes over to it, or to the first of the modes, after a few
        plain steps, because that nearly always pays; several sessions compare it first."""
        self.recovery = Recovery()
        self._load = load
        self._modes = modes
        self._shares = [*_distinct(load.sessions)]
        self.usual = PLAIN
        if hint != PLAIN:
            hint = Arm(hint.mode, next(share for share in self._shares if share <= hint.denominator))
        # A single session's first arm, and the steps until it takes the place of plain decoding.
        self._opening = None if load.size else Arm(modes[0], 1) if hint == PLAIN else hint
        self._plain_left = GOVERNOR.opening
        self._records: dict[tuple[Arm, Arm], _Record] = {}  # by usual arm and challenger
        self._trial: _ArmTrial | None = None
        self._first: Arm | None = None  # the next to be tried, before all others that are due
        self._now = 0.0  # seconds of all steps under the load
        self._next = 0.0  # when a trial may be due
        self._floor_s = 0.0  # level of the budget at which the usual arm, too, makes room for plain decoding
        self._halted = False  # it does, until what its drafters have still sent is verified
        self._speeds: dict[Arm, FadingRatio] = {}  # seconds of plain decoding for each second
        if load.size and hint != PLAIN:
            self._prefer(hint)

    @property
    def arm(self) -> Arm:
        """The arm for the next step."""
        if self._halted:
            return PLAIN
        trial = self._trial
        return trial.challenger if trial is not None and trial.challenged else self.usual

    @property
    def reason(self) -> str:
        """Why the arm is in force, for people."""
        if self._trial is not None:
            return f"{self._trial.challenger} has a trial against {self.usual}"
        judged = {arm: difference for usual, arm, difference, _ in self.judged() if usual == self.usual}
        if not judged:
            return "nothing else was compared with it yet"
        best = max(judged, key=lambda arm: judged[arm].mean)
        return f"the next best is {best}, whose speed over it was {judged[best]}"

    @property
    def drafted(self) -> bool:
        """Whether an arm that drafts has been in force."""
        return any(arm != PLAIN for arm in self._speeds)

    @property
    def beaten_speedup(self) -> float | None:
        """Speed over plain decoding of the best arm that drafts, where plain decoding is faster: in the pairs that
        decided, or else over the steps that emptied the budget. None where none was slower."""
        if self.usual != PLAIN:
            return None
        speeds = {arm: speed.ratio for arm, speed in self._speeds.items() if arm != PLAIN}
        speeds |= {arm: math.exp(it.mean) for usual, arm, it, _ in self.judged() if usual == PLAIN}
        best = max(speeds.values(), default=1.0)
        return best if best < 1.0 else None

    def observe(self, arm: Arm, step: StepOutcome, plain_seconds: float, *, settled: bool) -> None:
        """Record a step under `arm`. Plain decoding would have taken `plain_seconds` for its work."""
        if self._opening is not None:
            return
        if self._trial is None:
            self._begin_trial(step)
            return
        trial = self._trial
        challenged = arm == trial.challenger
        trial.spend(plain_seconds, step.seconds, challenged=challenged)
        if trial.blocks < 2 and step.drafting < arm.drafted(step.eligible):  # drafters are being attached
            trial.waited += step.seconds
            if trial.waited < GOVERNOR.wait_s:
                return
            if not step.drafting:
                self._defeat(trial)
                return
        if settled and trial.challenged is challenged and trial.observe(plain_seconds, step.work.tokens, step.seconds):
            self._decide(trial)

    def record(self, arm: Arm, plain_seconds: float, seconds: float) -> None:
        """Record a step for the speed of its arm, with all that settling and reading cost."""
        self._speeds.setdefault(arm, FadingRatio()).observe(plain_seconds, seconds)
        self._now += seconds

    def open(self) -> None:
        """Count a step of a single session towards its first arm."""
        if self._opening is not None:
            self._plain_left -= 1
            if self._plain_left <= 0:
                self.usual, self._opening, self._next = self._opening, None, self._now

    def limit(self, budget: DelayBudget, *, plain: bool) -> None:
        """Decode plainly, because the delay budget is empty. Where a challenger has emptied it, return to the usual
        arm, and only if that one loses more, to plain decoding.

        The usual arm stays usual if what its drafters had already sent fills the budget again, before a step is
        `plain`: where steps are long, one of them takes or brings more than the budget holds.
        """
        if self._trial is not None:
            self._floor_s = 0.0 if self.arm == self.usual else budget.left_s - DELAY.recovered * budget.capacity_s
            self._defeat(self._trial)
        if self.usual == PLAIN or (budget.left_s > self._floor_s and not self._halted):
            return
        self._halted = not plain
        if not plain:
            return
        stopped, self.usual = self.usual, PLAIN
        if self._floor_s:  # a challenger had spent what the usual arm would have needed
            self._prefer(stopped)
        else:
            self._record(stopped).fail(self._now)
            for other in self._in_other_modes(stopped):
                self._prefer(other)

    def resume(self) -> None:
        """Go on with the usual arm, because the budget allows it."""
        self._halted = False
        self._floor_s = 0.0

    def pause(self) -> None:
        """Leave an incomplete pair out, because the load has changed."""
        if self._trial is not None:
            self._trial.restart_pair()

    def reconsider(self) -> None:
        """Try all arms again soon."""
        self._next = 0.0
        for record in self._records.values():
            record.forgive(self._now)

    def estimates(self) -> dict[str, Any]:
        """Return the usual arm, the running trial, and all comparisons."""
        trial = self._trial
        return {
            "sessions": self._load.sessions,
            "kind": "greedy" if self._load.greedy else "sampled",
            "representative": self._load.representative,
            "usual": str(self.usual),
            "trial": None if trial is None else str(trial.challenger),
            "speeds": [{"arm": str(arm), "ratio": speed.ratio} for arm, speed in tuple(self._speeds.items())],
            "compared": [
                {"usual": str(usual), "arm": str(arm), "due_s": max(0.0, due - self._now), **difference.estimates()}
                for usual, arm, difference, due in self.judged()
            ],
        }

    def judged(self) -> Iterator[tuple[Arm, Arm, PairedDifference, float]]:
        """Yield the usual arm, the other one, how much faster that was, and when it is tried again."""
        for arms, record in tuple(self._records.items()):
            if record.difference.pairs:
                yield *arms, record.difference, record.due

    def _prefer(self, arm: Arm) -> None:
        """Try an arm now, before all others."""
        self._first = arm
        self._record(arm).due = min(self._record(arm).due, self._now)
        self._next = self._now

    def _begin_trial(self, step: StepOutcome) -> None:
        """Begin a trial that is due, if there is one: of the preferred arm, else of the largest share, which may win
        most."""
        if not step.eligible or (self.usual != PLAIN and not step.drafting):
            return  # there is nobody to draft for, or no drafter has come yet
        if self._now < self._next:
            return
        records = {arm: self._record(arm) for arm in self._candidates()}
        due = [arm for arm, record in records.items() if record.due <= self._now]
        if not due:
            self._next = min(record.due for record in records.values())
            return
        arm = min(due, key=lambda arm: (arm != self._first, arm.denominator or math.inf, records[arm].due))
        self._first = None
        self._trial = _ArmTrial(arm, records[arm].difference)

    def _candidates(self) -> Iterator[Arm]:
        """Yield what may be compared with the usual arm: plain decoding, the other mode, the neighbouring shares."""
        if self.usual == PLAIN:
            for mode in self._modes:
                yield from self._climb(mode, self._shares)
            yield from (arm for usual, arm in tuple(self._records) if usual == PLAIN)
            return
        yield PLAIN
        rung = self._shares.index(self.usual.denominator)
        yield from self._climb(self.usual.mode, self._shares[rung + 1 :])
        if rung:
            yield Arm(self.usual.mode, self._shares[rung - 1])
        yield from self._in_other_modes(self.usual)

    def _in_other_modes(self, arm: Arm) -> Iterator[Arm]:
        """Yield the other ways to draft for the same share."""
        yield from (arm._replace(mode=mode) for mode in self._modes if mode is not arm.mode)

    def _climb(self, mode: OverlapMode, shares: Sequence[int]) -> Iterator[Arm]:
        """Yield shares from the smallest on; a larger one only if those before were tried and did no harm."""
        for denominator in shares:
            arm = Arm(mode, denominator)
            yield arm
            record = self._records.get((self.usual, arm))
            if record is None or not record.difference.pairs or record.difference.high < -GOVERNOR.margin:
                break

    def _decide(self, trial: _ArmTrial) -> None:
        """End the trial if the pair that is complete has made it clear, or if there were enough of them."""
        margin = GOVERNOR.margin * ((self.usual == PLAIN) - (trial.challenger == PLAIN))
        tie_margin = math.inf if self.usual == PLAIN else 0.0 if trial.challenger == PLAIN else GOVERNOR.margin
        wins = trial.verdict(margin, tie_margin)
        if wins:
            self._trial = None
            beaten, self.usual = self.usual, trial.challenger
            self._next = self._now
            record = self._record(beaten)
            record.difference = trial.difference.reversed()
            record.fail(self._now, trial.lost(by_challenger=False), trial.lasted)
        elif wins is not None:
            self._defeat(trial)

    def _defeat(self, trial: _ArmTrial) -> None:
        self._trial = None
        self._record(trial.challenger).fail(self._now, trial.lost(by_challenger=True), trial.lasted)

    def _record(self, challenger: Arm) -> _Record:
        """Return the record of a challenger. Only a larger share in the same mode is tried without a pause."""
        if (self.usual, challenger) not in self._records:
            climbs = self.usual == PLAIN or (
                challenger.mode is self.usual.mode and challenger.denominator < self.usual.denominator
            )
            rests = 4.0 * GOVERNOR.rest_s if challenger == PLAIN else GOVERNOR.rest_s
            self._records[self.usual, challenger] = _Record(self._now + (0.0 if climbs else rests))
        return self._records[self.usual, challenger]


class _Record(TrialSchedule):
    """What is known of a challenger beside a usual arm, and when it is tried again."""

    def __init__(self, due: float) -> None:
        super().__init__(GOVERNOR.retry_s, due)
        self.difference = PairedDifference()


class _ArmTrial(PairedTrial):
    """A trial of an arm."""

    def __init__(self, challenger: Arm, difference: PairedDifference) -> None:
        super().__init__(difference)
        self.challenger = challenger
        self.waited = 0.0  # seconds, for drafters


def _distinct(sessions: int) -> Iterator[int]:
    """Yield the denominators under which different numbers of the sessions are drafted for."""
    for denominator, larger in pairwise(GOVERNOR.denominators):
        if -(-sessions // denominator) != -(-sessions // larger):
            yield denominator
    yield GOVERNOR.denominators[-1]
