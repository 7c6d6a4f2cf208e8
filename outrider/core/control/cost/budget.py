"""How many tree nodes one verifier step takes: the number that maximises goodput, expected tokens per second.

Sources: TurboSpec (arXiv 2406.14066); TETRIS (arXiv 2502.15197) for the choice over all sessions at once.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.core.stats import LONG


@dataclass(frozen=True, slots=True)
class CostTuning:
    """How the cost of a pass, and plain decoding's pace, are corrected by each step."""

    overhead_s: float = 0.0015  # seconds of a step outside the forward pass and the waits, before they are measured
    nearby: float = 0.06  # weight of one observation, at its neighbouring points
    everywhere: float = 0.04  # weight of one observation, at all other points
    fading: float = 0.001  # share of a point's own correction that each observation takes back
    most_sessions: int = 32  # up to this many, the time outside the pass is assumed to be constant at first
    slope_span: int = 8  # tokens over which the marginal cost is averaged, because the cost rises in steps
    fades_s: float = 20.0  # time in which the weight of a plain step falls to 1 / e
    longest_s: float = 1.0  # a longer step fades others as one of this length
    prior_steps: float = 4.0  # weight of the sweep at start, or of the nearest load, in plain steps
    least_steps: float = 0.1  # weight of the sweep for prefill, which it measures poorly; floor of both weights
    prior_deviation: float = 0.05  # relative standard deviation of a step's time that is assumed at first
    least_factor: float = 0.01  # floor of the factor of either kind of work
    most_deviation: float = 2.0  # a step that takes longer than this multiple of the mean counts as this multiple


COST = CostTuning()


class CostModel:
    """t(n), the seconds that a pass over n tokens takes, measured at start; and o(s), the seconds that a step with s
    sessions takes outside its pass and its waits. Both are updated by every step since."""

    def __init__(self, sweep: Sequence[tuple[int, float]]) -> None:
        """`sweep` holds measured pairs of (tokens, seconds), at least one."""
        self._tokens = [tokens for tokens, _ in sorted(sweep)]
        self._sweep = [seconds for _, seconds in sorted(sweep)]
        self._numbers = np.arange(self._tokens[-1] + 1)
        self._scale = 0.0  # log of the common correction since the sweep
        self._own = [0.0] * len(sweep)  # log of each point's further correction
        self._larger = 1.0  # slope above the largest measured size, over the slope just below it
        self._overhead = _Line(COST.overhead_s, COST.most_sessions)
        self._fit()

    def seconds(self, tokens: int) -> float:
        """Return the expected duration of a pass over `tokens` tokens, in seconds; it never falls with more tokens."""
        more = tokens - self._tokens[-1]
        return float(self._curve[tokens] if more <= 0 else self._curve[-1] + self._larger * self._slope * more)

    def curve(self, first: int, count: int) -> NDArray[np.float64]:
        """Return the expected durations of passes over `first` tokens, and over each number after it: [count]."""
        known = self._curve[first : first + count]
        if len(known) == count:
            return known
        beyond = [self.seconds(tokens) for tokens in range(first + len(known), first + count)]
        return np.concatenate([known, beyond])

    def overhead(self, sessions: int) -> float:
        """Return the expected seconds of a step with `sessions` sessions outside its pass and its waits."""
        return self._overhead.at(sessions)

    def observe_overhead(self, sessions: int, seconds: float) -> None:
        """Record the seconds of a step outside its pass and its waits. An outlier counts as at most twice the expected
        ones."""
        self._overhead.observe(sessions, min(seconds, 2.0 * max(self.overhead(sessions), COST.overhead_s)))

    def in_tokens(self, decoding: int, read: int) -> float:
        """Return the time that reading `read` prompt tokens adds to a pass, in tokens: those that `decoding` sessions
        would decode in that time. With no decoding session, count the tokens of one."""
        one = self.seconds(max(1, decoding)) / max(1, decoding)
        return (self.seconds(decoding + read) - self.seconds(decoding)) / one if read else 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Record that a pass over `tokens` took `seconds`. An outlier counts as at most twice the expected duration.

        The whole curve follows, because a slower machine is slower at every size; the neighbouring points follow more.
        Their lead fades, so that sizes which no pass has for hours keep their relation to the others: noise alone would
        carry them away.
        """
        error = min(2.0, seconds / self.seconds(tokens)) - 1
        if tokens > self._tokens[-1]:
            self._larger *= math.exp(error * COST.nearby)
            return
        above = bisect_left(self._tokens, tokens)
        self._scale += error * COST.everywhere
        for index in range(max(0, above - 1), above + 1):
            self._own[index] += error * (COST.nearby - COST.everywhere) - COST.fading * self._own[index]
        self._fit()

    def points(self) -> list[tuple[int, float]]:
        """Return the fitted curve at the measured points: pairs of (tokens, seconds)."""
        return list(zip(self._tokens, map(float, self._fitted), strict=True))

    def _fit(self) -> None:
        changed = [own + self._scale for own in self._own]
        self._fitted = np.maximum.accumulate(self._sweep * np.exp(changed))
        # Every number of tokens that a step may ask for.
        self._curve = curve = np.interp(self._numbers, self._tokens, self._fitted)
        span = min(COST.slope_span, self._tokens[-1] - 1)
        rise = float(curve[-1] - curve[-1 - span]) if span else 0.0
        self._slope = rise / span if rise else float(curve[-1]) / self._tokens[-1]


class _Line:
    """A straight line through weighted points, of which earlier ones fade: a + c * x by least squares."""

    def __init__(self, level: float, until: float) -> None:
        """Begin with a level line, as if each end of [0, `until`] had been observed twice."""
        self._count, self._x, self._xx = 4.0, 2.0 * until, 2.0 * until**2
        self._y, self._xy = 4.0 * level, 2.0 * until * level

    def observe(self, x: float, y: float) -> None:
        self._count, self._x, self._xx = LONG * self._count + 1.0, LONG * self._x + x, LONG * self._xx + x * x
        self._y, self._xy = LONG * self._y + y, LONG * self._xy + x * y

    def at(self, x: float) -> float:
        spread = self._count * self._xx - self._x**2
        slope = (self._count * self._xy - self._x * self._y) / spread if spread > 1e-6 * self._count**2 else 0.0
        return max(0.0, self._y / self._count + max(0.0, slope) * (x - self._x / self._count))


class VerificationBudget(NamedTuple):
    """The tree nodes that a step verifies, and its expected result."""

    nodes: int  # how many of the best nodes
    expected: float  # tokens that the step is expected to commit
    seconds: float  # expected, from the end of the step before to the end of this one
    min_path_score: float  # path score below which a node is not worth verifying


def choose_budget(
    scores: Sequence[float] | NDArray[np.float64],
    base: int,
    certain: float,
    cost: CostModel,
    outside: float = COST.overhead_s,
) -> VerificationBudget:
    """Choose n to maximise (certain + scores[:n].sum()) / (t(base + n) + outside).

    `scores` are the path scores of all candidate nodes over all sessions, best first. `base` is the number of tokens
    that the pass holds in any case. `certain` is the number of tokens that it commits in any case, one per session,
    plus its other work in tokens. `outside` are the step's seconds outside the pass: its overhead, and the wait since
    the step before ended. They are part of the step's cost, so a step that waited longer should take more nodes.
    """
    expected = np.full(len(scores) + 1, float(certain))
    expected[1:] += np.cumsum(scores)
    seconds = cost.curve(base, len(expected)) + outside
    nodes = int(np.argmax(expected / seconds))
    here, promised, lasts = base + nodes, float(expected[nodes]), float(seconds[nodes])
    slope = (cost.seconds(here + COST.slope_span) - cost.seconds(here)) / COST.slope_span
    return VerificationBudget(nodes, promised, lasts, min(1.0, slope * promised / lasts))
