"""How much of the trees at hand one verifier step takes: what maximises goodput, expected tokens over time.

Source: TurboSpec (arXiv 2406.14066), and for the choice over all sessions at once TETRIS (arXiv 2502.15197).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

OVERHEAD_S = 0.0015  # of a step outside the forward pass and the waits
NEARBY, EVERYWHERE = 0.06, 0.04  # how far the curve follows one observation
SLOPE_SPAN = 8  # tokens over which the marginal cost is averaged: the cost is stepped


class CostModel:
    """t(n): seconds that a pass over n tokens takes. Swept at start, kept up by what steps took since."""

    def __init__(self, sweep: Sequence[tuple[int, float]]) -> None:
        """`sweep`: pairs of (tokens, seconds), at least one."""
        self._tokens = [tokens for tokens, _ in sorted(sweep)]
        self._measured = [seconds for _, seconds in sorted(sweep)]
        self._fit()

    def seconds(self, tokens: int) -> float:
        """Expected duration of a pass; never falls with more tokens."""
        if tokens > self._tokens[-1]:
            return float(self._fitted[-1] * tokens / self._tokens[-1])
        return float(np.interp(tokens, self._tokens, self._fitted))

    def in_tokens(self, decoding: int, read: int) -> float:
        """What reading so much of a prompt besides is worth: the tokens that so many sessions would decode meanwhile.

        With none that decodes, the tokens of one.
        """
        one = self.seconds(max(1, decoding)) / max(1, decoding)
        return (self.seconds(decoding + read) - self.seconds(decoding)) / one if read else 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """A pass over `tokens` took `seconds`. Outliers (a preempted step) count as at most twice the expected.

        The whole curve follows, because a slower machine is slower at every size; the points nearby follow more.
        """
        if tokens > self._tokens[-1]:
            return
        error = min(2.0, seconds / self.seconds(tokens)) - 1
        above = bisect_left(self._tokens, tokens)
        for index in range(len(self._measured)):
            self._measured[index] *= 1 + error * (NEARBY if above - 1 <= index <= above else EVERYWHERE)
        self._fit()

    def points(self) -> list[tuple[int, float]]:
        """The fitted curve at the swept points."""
        return list(zip(self._tokens, map(float, self._fitted), strict=True))

    def _fit(self) -> None:
        self._fitted = np.maximum.accumulate(self._measured)


class Budget(NamedTuple):
    """What a step takes."""

    nodes: int  # how many of the scores, best first
    expected: float  # tokens that the step is expected to commit
    seconds: float  # from the end of the step before to the end of this one, as expected
    price: float  # path score below which a node would not be worth verifying


def choose_budget(scores: Sequence[float], base: int, certain: float, cost: CostModel, waited: float = 0.0) -> Budget:
    """Picks n to maximise (certain + scores[:n].sum()) / (t(base + n) + overhead + waited).

    scores: path scores of all candidates over all sessions, best first. base: tokens in the pass whatever is
    chosen. certain: tokens it commits whatever is chosen, one a session, and what else it does, in tokens. waited:
    seconds since the step before ended: they are gone, but they are part of what a step costs, and the longer it took
    the more it should carry.
    """
    overhead = OVERHEAD_S + waited
    best = Budget(0, float(certain), cost.seconds(base) + overhead, 1.0)
    expected = float(certain)
    for count, score in enumerate(scores, 1):
        expected += score
        seconds = cost.seconds(base + count) + overhead
        if expected * best.seconds > best.expected * seconds:
            best = Budget(count, expected, seconds, score)
    here = base + best.nodes
    slope = (cost.seconds(here + SLOPE_SPAN) - cost.seconds(here)) / SLOPE_SPAN
    return best._replace(price=min(1.0, slope * best.expected / best.seconds))
