"""Comparison of two ways of working in blocks A B B A, by paired differences.

A machine's speed drifts by more than the two ways differ. Blocks that follow one another are drifted alike, and in the
order A B B A a linear drift cancels. See docs/control.md, "Trials".
"""

from __future__ import annotations

import math
from typing import Final

BLOCK_STEPS = (4, 12)  # steps of a block that count: at least, and at most
BLOCK_TOKENS = 48  # least tokens and steps of a complete block
LARGEST = 20.0  # logarithm of a ratio beyond which a bound is shown as this
KEPT = 0.5  # weight of what earlier trials have shown
# Two-sided 95 % quantiles of Student's distribution, for 1 to 12 degrees of freedom; more are as many as 12.
QUANTILES: Final = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)


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

    @property
    def ratio(self) -> float:
        """The ratio of the two speeds."""
        return math.exp(self.mean)

    @property
    def lowest(self) -> float | None:
        """Lower bound of the ratio; None where there are too few pairs for bounds."""
        return math.exp(self.low) if math.isfinite(self.error) else None

    @property
    def highest(self) -> float | None:
        """Upper bound of the ratio; None where there are too few pairs for bounds."""
        return math.exp(min(self.high, LARGEST)) if math.isfinite(self.error) else None

    def __str__(self) -> str:
        bounds = "one pair" if self.lowest is None else f"{self.lowest:.2f} to {self.highest:.2f}"
        return f"{self.ratio:.2f} ({bounds})"

    def estimates(self) -> dict[str, float | None]:
        """Return the ratio of the two speeds, its bounds, and the number of pairs."""
        return {"ratio": self.ratio, "low": self.lowest, "high": self.highest, "pairs": self.pairs}


class PairedTrial:
    """Blocks of steps in the order A B B A A B B A ..., where A is the usual way (`challenged` is False) and B the
    challenger. Steps that settle belong to no block."""

    def __init__(self, difference: PairedDifference) -> None:
        """`difference`: of the challenger from the usual way, from earlier trials. The trial adds to it."""
        difference.fade(KEPT)
        self.difference = difference
        self.challenged = False  # whether the challenger is in force now
        self.blocks = 0  # complete ones
        self._first = 0.0  # logarithm of the speed in the first block of the pair
        self._clear()

    def observe(self, work: float, tokens: float, seconds: float) -> bool:
        """Record a step that did `work`, in any unit, and committed `tokens`. Return whether a pair is complete."""
        self._work += work
        self._tokens += tokens
        self._seconds += seconds
        self._steps += 1
        least, most = BLOCK_STEPS
        if self._steps < least or (self._steps < most and self._tokens < BLOCK_TOKENS):
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

    def restart_pair(self) -> None:
        """Forget the pair that is not complete, because something else has changed meanwhile."""
        if self.blocks % 2:
            self.blocks -= 1
            self.challenged = not self.challenged
        self._clear()

    def _clear(self) -> None:
        self._work, self._tokens, self._seconds, self._steps = 0.0, 0.0, 0.0, 0
