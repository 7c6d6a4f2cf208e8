"""A bound on what speculation may cost: seconds of delay, spent by steps that are slower than plain decoding.

See docs/control.md, "The bound".
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DelayTuning:
    """What speculation may cost."""

    capacity_s: float = 0.1  # seconds of delay that a full budget allows at once, at least
    steps: float = 3.0  # plain steps that it allows at least: of a large model, one step would empty the bucket
    refill: float = 0.006  # seconds of delay that come back with each second
    recovered: float = 0.3  # share of a full budget that must be back before drafting is tried again, the first time


DELAY = DelayTuning()


class DelayBudget:
    """A leaky bucket of seconds. A step that is slower than plain decoding takes its delay out of the bucket; a step
    that is faster puts its gain back, but never above the brim, so that an earlier gain does not pay for a later loss.

    While steps that may be delayed begin only when the bucket is not empty, the steps of any window of T seconds are
    delayed by at most 0.1 + 0.006 * T seconds in sum, plus the delay of the step that emptied it: for 10 seconds that
    is 1.6 %, plus one step. Where plain steps take more than 33 ms, three of them stand for the 0.1 seconds.
    """

    def __init__(self, tuning: DelayTuning = DELAY) -> None:
        self.capacity_s = tuning.capacity_s
        self._tuning = tuning
        self._spent_s = 0.0

    @property
    def left_s(self) -> float:
        """Seconds of delay left; below 0 by what the last step overdrew."""
        return self.capacity_s - self._spent_s

    def follow(self, plain_step_s: float) -> None:
        """Take account of what a plain step of a single session takes."""
        self.capacity_s = max(self._tuning.capacity_s, self._tuning.steps * plain_step_s)

    def spend(self, seconds: float, delay: float) -> None:
        """Record a step that took `seconds`, which is `delay` seconds more (or, if negative, less) than plain decoding
        would have taken for the same work."""
        self._spent_s = max(0.0, self._spent_s - self._tuning.refill * seconds + delay)

    @property
    def empty(self) -> bool:
        """Whether only plain decoding is allowed."""
        return self.left_s <= 0.0


class Recovery:
    """Under one load, how much of a budget that was empty must be back before drafting is tried again.

    Whenever it was empty again before it was full, twice as much must be: what drafting costs at first, while drafters
    read, may have been too much for it.
    """

    def __init__(self) -> None:
        self._needed = DELAY.recovered / 2  # share of a full budget
        self._was_empty = False

    def recovered(self, budget: DelayBudget) -> bool:
        """Take account of a step under the load, and return whether enough of the budget is back."""
        if budget.left_s == budget.capacity_s:
            self._needed = DELAY.recovered / 2
        elif budget.empty and not self._was_empty:
            self._needed = min(1.0, 2.0 * self._needed)
        self._was_empty = budget.empty
        return budget.left_s >= max(DELAY.recovered, self._needed) * budget.capacity_s
