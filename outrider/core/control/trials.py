"""Try, measure, decide at a bounded cost: what the trials of control are made of.

A machine's speed drifts by more than the difference between two ways of working. Blocks that follow one another are
drifted alike, and in the order A B B A a linear drift cancels. What a trial has lost is made up for by a pause before
the next one. See docs/control.md, "Trials".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

# Two-sided 95 % quantiles of Student's distribution, for 1 to 12 degrees of freedom; more are as many as 12.
QUANTILES: Final = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)
LARGEST = 20.0  # logarithm of a ratio beyond which a bound is shown as this


@dataclass(frozen=True, slots=True)
class TrialTuning:
    """What trials are made of, and what they may cost."""

    block_steps: tuple[int, int] = (4, 12)  # steps of a block that count: at least, and at most
    block_tokens: int = 48  # tokens that end a block early
    min_pairs: int = 3  # fewest pairs (earlier trials included) for a verdict
    max_pairs: int = 8  # most pairs in one trial
    kept: float = 0.5  # weight of the pairs of earlier trials
    loss: float = 0.005  # share of the time, or of the tokens, that the trials of one thing may cost
    apart: float = 10.0  # shortest pause, in multiples of a trial's duration


TRIALS = TrialTuning()


class PairedDifference:
    """The mean of paired differences of logarithms, with a confidence interval of 95 %. Earlier ones fade."""

    def __init__(self) -> None:
        self.pairs = 0.0  # effective number
        self.mean = 0.0
        self._squares = 0.0

    def observe(self, value: float) -> None:
        """Add the difference of a pair."""
        self.pairs += 1.0
        off = value - self.mean
        self.mean += off / self.pairs
        self._squares += off * (value - self.mean)

    def fade(self, weight: float) -> None:
        """Let the pairs so far count by `weight`, from 0 to 1."""
        self.pairs *= weight
        self._squares *= weight

    def reversed(self) -> PairedDifference:
        """Return the difference the other way round."""
        other = PairedDifference()
        other.pairs, other.mean, other._squares = self.pairs, -self.mean, self._squares
        return other

    @property
    def error(self) -> float:
        """Half the width of the confidence interval; infinite for fewer than two pairs."""
        freedom = self.pairs - 1.0
        if freedom < 1.0:
            return math.inf
        quantile = QUANTILES[min(int(freedom), len(QUANTILES)) - 1]
        return quantile * math.sqrt(self._squares / freedom / self.pairs)

    @property
    def low(self) -> float:
        """Lower bound of the difference."""
        return self.mean - self.error

    @property
    def high(self) -> float:
        """Upper bound of the difference."""
        return self.mean + self.error

    def estimates(self) -> dict[str, float | None]:
        """Return the ratio of the two speeds, its bounds (None for fewer than two pairs), and the number of pairs."""
        low, high = (math.exp(self.low), math.exp(min(self.high, LARGEST))) if self.pairs >= 2.0 else (None, None)
        return {"ratio": math.exp(self.mean), "low": low, "high": high, "pairs": self.pairs}

    def __str__(self) -> str:
        shown = self.estimates()
        bounds = "one pair" if shown["low"] is None else f"{shown['low']:.2f} to {shown['high']:.2f}"
        return f"{shown['ratio']:.2f} ({bounds})"


class PairedTrial:
    """Blocks of steps in the order A B B A A B B A ..., where A is the usual way (`challenged` is False) and B the
    challenger. Steps that settle belong to no block, but what they take counts as the trial's cost."""

    def __init__(self, difference: PairedDifference) -> None:
        """`difference`: of the challenger from the usual way, from earlier trials. The trial adds to it."""
        difference.fade(TRIALS.kept)
        self.difference = difference
        self.challenged = False  # whether the challenger is in force now
        self.blocks = 0  # complete ones
        self._first = 0.0  # logarithm of the speed in the first block of the pair
        self._done = [0.0, 0.0]  # [usual, challenger] work of all steps
        self._took = [0.0, 0.0]  # [usual, challenger] seconds of all steps
        self._clear()

    def spend(self, work: float, seconds: float, *, challenged: bool) -> None:
        """Record what a step cost, whether it counts in a block or not. `work` is in seconds of any fixed pace."""
        self._done[challenged] += work
        self._took[challenged] += seconds

    def observe(self, work: float, tokens: float, seconds: float) -> bool:
        """Record a step that did `work`, in any unit, and committed `tokens`. Return whether a pair is complete."""
        self._work += work
        self._tokens += tokens
        self._seconds += seconds
        self._steps += 1
        least, most = TRIALS.block_steps
        if self._steps < least or (self._steps < most and self._tokens < TRIALS.block_tokens):
            return False
        speed = math.log(max(self._work, 1e-9) / max(self._seconds, 1e-9))
        self._clear()
        self.blocks += 1
        if self.blocks % 2:
            self._first = speed
            self.challenged = not self.challenged
            return False
        self.difference.observe(speed - self._first if self.challenged else self._first - speed)
        return True

    def verdict(self, margin: float, tie_margin: float) -> bool | None:
        """Return whether the challenger wins; None while more pairs have to decide.

        It wins if it is faster by `margin` with confidence, and loses if it surely is not. When there were enough pairs
        it wins if it is faster by `tie_margin` at the mean. Margins are logarithms of a ratio.
        """
        difference, enough = self.difference, self.blocks >= 2 * TRIALS.max_pairs
        if difference.pairs < TRIALS.min_pairs:
            return None
        if difference.low > margin or (enough and difference.mean > tie_margin):
            return True
        return False if difference.high < margin or enough else None

    def restart_pair(self) -> None:
        """Forget the pair that is not complete, because something else has changed meanwhile."""
        if self.blocks % 2:
            self.blocks -= 1
            self.challenged = not self.challenged
        self._clear()

    @property
    def lasted(self) -> float:
        """Seconds of the trial so far."""
        return sum(self._took)

    def lost(self, *, by_challenger: bool) -> float:
        """Return the seconds that the steps of one side took longer than the other side would have taken."""
        better, worse = not by_challenger, by_challenger
        pace = self._took[better] / self._done[better] if self._done[better] else 1.0
        return max(0.0, self._took[worse] - pace * self._done[worse])

    def _clear(self) -> None:
        self._work, self._tokens, self._seconds, self._steps = 0.0, 0.0, 0.0, 0


def pause_after(lost: float, lasted: float = 0.0) -> float:
    """Return the shortest pause after a trial that took `lasted` and lost `lost`, so that trials cost no more than they
    may. The unit is that of the caller's clock: seconds, or tokens."""
    return max(lost / TRIALS.loss, TRIALS.apart * lasted)


class TrialSchedule:
    """When something may be tried again that has not paid, on the caller's clock: in seconds, or in steps."""

    def __init__(self, pauses: tuple[float, float], due: float = 0.0) -> None:
        """`pauses`: after the first failure, and at most; each further failure doubles the first one."""
        self.due = due
        self._first, self._longest = pauses
        self._backoff = 0.0  # shortest pause after the latest failure

    def fail(self, now: float, lost: float = 0.0, lasted: float = 0.0) -> None:
        """Postpone the next trial, after one that ended at `now`, took `lasted` and lost `lost`."""
        self._backoff = 2.0 * self._backoff or self._first
        self.due = now + min(self._longest, max(pause_after(lost, lasted), self._backoff))

    def forgive(self, now: float) -> None:
        """Forget how often it has failed: the next trial is due after the first pause, if not before."""
        self.due = min(self.due, now + self._first)
        self._backoff = 0.0
