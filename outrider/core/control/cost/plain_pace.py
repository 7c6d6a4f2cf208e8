"""How long plain decoding takes: the measure against which speculation is judged.

See docs/control.md, "What plain decoding would take". Times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from outrider.core.control.cost.budget import COST, CostModel
from outrider.core.stats import RECENT, FadingRatio

CONFIDENCE = 1.96  # standard errors between the mean and a bound: 95 % lie between the bounds


class StepWork(NamedTuple):
    """What a step did."""

    sessions: int  # sessions that decoded
    read: int  # prompt tokens that it read beside
    tokens: float  # tokens that it committed, or is expected to, over all sessions


class PlainPace:
    """Predicts the seconds that plain decoding takes for a step's work, by the number of sessions that decode.

    The sweep at start gives the shape; what plain steps took in relation to it gives two factors, of decoding and of
    reading, for each power of two of sessions. Only plain steps count, so no contention with drafters does.
    """

    def __init__(self, sweep: Sequence[tuple[int, float]]) -> None:
        """`sweep`: pairs of (rows, seconds of an undisturbed pass), at least one."""
        self._cost = CostModel(sweep)
        self._fits: dict[int, _Fit] = {}
        self._now = 0.0

    def seconds(self, work: StepWork) -> float:
        """Return the seconds that plain decoding is expected to take for the same work."""
        return self._fit(work.sessions).seconds(self._modelled(work))

    def least_seconds(self, work: StepWork) -> float:
        """Return the lower bound of these seconds, hence the upper bound of the rate of plain decoding."""
        fit, modelled = self._fit(work.sessions), self._modelled(work)
        return max(0.0, fit.seconds(modelled) - CONFIDENCE * fit.standard_error(modelled))

    def tokens_per_s(self, sessions: int) -> float:
        """Return the tokens per second that plain decoding of `sessions` sessions is expected to commit."""
        return sessions / self.seconds(StepWork(sessions, 0, sessions))

    def observe(self, work: StepWork, seconds: float, *, plain: bool) -> None:
        """Record a step, `seconds` after the step before. Only a plain one is learned from."""
        self._now += min(seconds, COST.longest_s)
        if plain and (work.tokens or work.read):
            fit = self._fits.setdefault(_size(work.sessions), self._fit(work.sessions))
            fit.observe(self._modelled(work), seconds, self._now)

    def estimates(self) -> list[dict[str, Any]]:
        """Return the expected step for each number of sessions of which something is known."""
        known = []
        for size, fit in sorted(self._fits.items()):
            work = StepWork(2**size, 0, 2**size)
            known.append(
                {
                    "sessions": 2**size,
                    "step_s": self.seconds(work),
                    "tokens_per_s": self.tokens_per_s(2**size),
                    "relative_error": fit.standard_error(self._modelled(work)) / self.seconds(work),
                    "reading_ratio": fit.reading,
                    "steps": round(fit.steps - COST.prior_steps),
                }
            )
        return known

    def _modelled(self, work: StepWork) -> _Parts:
        """Return the seconds for the work by the sweep alone. More tokens than sessions are several steps' work; a step
        without a session takes at least what one with a single session would."""
        rows = max(1, work.sessions)
        step = self._cost.seconds(rows) + COST.overhead_s
        reading = self._cost.seconds(max(1, work.sessions + work.read)) - self._cost.seconds(rows)
        return _Parts(step * (work.tokens / work.sessions if work.sessions else 1.0), reading)

    def _fit(self, sessions: int) -> _Fit:
        """Return the fit for a number of sessions; for one of which nothing is known, a prior from the nearest."""
        size = _size(sessions)
        if size in self._fits:
            return self._fits[size]
        if not self._fits:
            return _Fit(1.0, 1.0)
        nearest = self._fits[min(self._fits, key=lambda known: abs(known - size))]
        return _Fit(nearest.decoding, nearest.reading)


class _Parts(NamedTuple):
    """Seconds of a step's two kinds of work."""

    decoding: float
    reading: float


class _Fit:
    """What decoding and reading took over what the sweep gives for them, and how well that is known.

    Recursive least squares with two unknowns, of steps' times over the sweep's, of which earlier ones fade: a factor of
    which nothing new is known stays where it is, but is less certain.
    """

    __slots__ = ("_at", "_both", "_decoding", "_reading", "_squares", "_variance", "decoding", "reading", "steps")

    def __init__(self, decoding: float, reading: float) -> None:
        self.decoding = decoding  # factors
        self.reading = reading
        self._decoding, self._reading = COST.prior_steps, COST.least_steps  # the information matrix: its diagonal,
        self._both = 0.0  # and the other element
        self.steps = COST.prior_steps  # effective number, of which earlier ones fade
        self._squares = COST.prior_steps  # sum of the squares of their weights
        squares = COST.prior_steps * (COST.prior_deviation * decoding) ** 2
        self._variance = FadingRatio(hits=squares, attempts=COST.prior_steps)  # of a step; time fades none
        self._at = 0.0  # when the last step ended

    def seconds(self, modelled: _Parts) -> float:
        """Return what work takes for which the sweep gives `modelled`."""
        return self.decoding * modelled.decoding + self.reading * modelled.reading

    def standard_error(self, modelled: _Parts) -> float:
        """Return the standard error of that mean."""
        x, y = modelled
        spread = (x * x * self._reading - 2.0 * x * y * self._both + y * y * self._decoding) / self._determinant
        return math.sqrt(self._variance.ratio * self._squares / self.steps * spread)

    def observe(self, modelled: _Parts, seconds: float, now: float) -> None:
        """Add a step that ended at the time `now` and took `seconds`."""
        whole, expected = sum(modelled), self.seconds(modelled)
        x, y = modelled.decoding / whole, modelled.reading / whole
        off = (min(seconds, COST.most_deviation * expected) - expected) / whole
        faded, self._at = RECENT * math.exp((self._at - now) / COST.fades_s), now
        kept = (1.0 - faded) * COST.least_steps
        self._decoding = faded * self._decoding + x * x + kept
        self._reading = faded * self._reading + y * y + kept
        self._both = faded * self._both + x * y
        moved = off / self._determinant
        self.decoding = max(COST.least_factor, self.decoding + moved * (self._reading * x - self._both * y))
        self.reading = max(COST.least_factor, self.reading + moved * (self._decoding * y - self._both * x))
        self.steps = faded * self.steps + 1.0
        self._squares = faded**2 * self._squares + 1.0
        self._variance.observe(off**2)

    @property
    def _determinant(self) -> float:
        return self._decoding * self._reading - self._both**2


def _size(sessions: int) -> int:
    return round(math.log2(max(1, sessions)))
