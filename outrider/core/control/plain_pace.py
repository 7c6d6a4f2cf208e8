"""How long plain decoding takes: the measure against which speculation is judged.

See docs/control.md, "What plain decoding would take". Times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from outrider.core.control.budget import OVERHEAD_S, CostModel

MEMORY = 0.97  # weight of the past at each plain step
FADES_S = 20.0  # time in which the weight of a plain step falls to 1 / e
LONGEST_S = 1.0  # a step counts as at most so long when others fade
PRIOR_STEPS = 4.0  # plain steps that the sweep at start, or the nearest load, counts as
PRIOR_DEVIATION = 0.05  # relative standard deviation of a step's time that is assumed at first
MOST_DEVIATION = 2.0  # a step that takes longer than this multiple of the mean counts as this multiple
CONFIDENCE = 1.96  # standard errors between the mean and a bound: 95 % lie between the bounds


class StepWork(NamedTuple):
    """What a step did."""

    sessions: int  # that decoded
    read: int  # prompt tokens that it read beside
    tokens: float  # that it committed, or is expected to, over all sessions


class PlainPace:
    """Predicts the seconds that plain decoding takes for a step's work, by the number of sessions that decode.

    The sweep at start gives the shape; what each plain step took in relation to it gives the factor, one for each
    power of two of sessions. Only plain steps count, so no contention with drafters does.
    """

    def __init__(self, sweep: Sequence[tuple[int, float]]) -> None:
        """`sweep`: pairs of (rows, seconds of an undisturbed pass), at least one."""
        self._cost = CostModel(sweep)
        self._factors: dict[int, _Factor] = {}
        self._now = 0.0

    def seconds(self, work: StepWork) -> float:
        """Return the seconds that plain decoding is expected to take for the same work."""
        return self._modelled(work) * self._factor(work.sessions).mean

    def least_seconds(self, work: StepWork) -> float:
        """Return the lower bound of these seconds, hence the upper bound of the rate of plain decoding."""
        factor = self._factor(work.sessions)
        return self._modelled(work) * max(0.0, factor.mean - CONFIDENCE * factor.standard_error)

    def tokens_per_s(self, sessions: int) -> float:
        """Return the tokens per second that plain decoding of so many sessions is expected to commit."""
        return sessions / self.seconds(StepWork(sessions, 0, sessions))

    def observe(self, work: StepWork, seconds: float, *, plain: bool) -> None:
        """Record a step, `seconds` after the step before. Only a plain one is learned from."""
        self._now += min(seconds, LONGEST_S)
        if plain and (modelled := self._modelled(work)):
            factor = self._factors.setdefault(_size(work.sessions), self._factor(work.sessions))
            factor.observe(seconds / modelled, self._now)

    def estimates(self) -> list[dict[str, Any]]:
        """Return the expected step for each number of sessions of which something is known."""
        return [
            {
                "sessions": 2**size,
                "step_s": self.seconds(StepWork(2**size, 0, 2**size)),
                "tokens_per_s": self.tokens_per_s(2**size),
                "relative_error": factor.standard_error / factor.mean,
                "steps": round(factor.steps - PRIOR_STEPS),
            }
            for size, factor in sorted(self._factors.items())
        ]

    def _modelled(self, work: StepWork) -> float:
        """Return the seconds for the work by the sweep alone. More tokens than sessions are several steps' work."""
        if not work.sessions:
            return self._cost.seconds(max(1, work.read)) + OVERHEAD_S
        step = self._cost.seconds(work.sessions) + OVERHEAD_S
        reading = self._cost.seconds(work.sessions + work.read) - self._cost.seconds(work.sessions)
        return step * work.tokens / work.sessions + reading

    def _factor(self, sessions: int) -> _Factor:
        """Return the factor for a number of sessions; for one of which nothing is known, a prior from the nearest."""
        size = _size(sessions)
        if size in self._factors:
            return self._factors[size]
        nearest = min(self._factors, key=lambda known: abs(known - size), default=None)
        return _Factor(1.0 if nearest is None else self._factors[nearest].mean)


class _Factor:
    """The weighted mean of what steps took over what the sweep gives for them, and its standard error."""

    __slots__ = ("_at", "_squares", "_weights", "mean", "steps")

    def __init__(self, mean: float) -> None:
        self.mean = mean
        self._at = 0.0  # when the last step ended
        self.steps = PRIOR_STEPS  # effective number
        self._weights = PRIOR_STEPS  # sum of the squares of all weights
        self._squares = PRIOR_STEPS * (PRIOR_DEVIATION * mean) ** 2  # weighted sum of squared deviations

    def observe(self, value: float, now: float) -> None:
        """Add what a step took, in multiples of the sweep's time, at the time `now`."""
        value = min(value, MOST_DEVIATION * self.mean)
        memory, self._at = MEMORY * math.exp((self._at - now) / FADES_S), now
        off = value - self.mean
        self.steps = memory * self.steps + 1.0
        self._weights = memory**2 * self._weights + 1.0
        self.mean += off / self.steps
        self._squares = memory * self._squares + off * (value - self.mean)

    @property
    def standard_error(self) -> float:
        return math.sqrt(self._squares / self.steps * self._weights) / self.steps


def _size(sessions: int) -> int:
    return round(math.log2(max(1, sessions)))
