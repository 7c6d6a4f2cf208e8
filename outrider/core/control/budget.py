"""How many tree nodes one verifier step takes: the number that maximises goodput, expected tokens per second.

Sources: TurboSpec (arXiv 2406.14066); TETRIS (arXiv 2502.15197) for the choice over all sessions at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

OVERHEAD_S = 0.0015  # seconds of a step outside the forward pass and the waits
NEARBY, EVERYWHERE = 0.06, 0.04  # weight of one observation, at its neighbouring points and at all others
SLOPE_SPAN = 8  # tokens over which the marginal cost is averaged, because the cost rises in steps


class CostModel:
    """t(n), the seconds that a pass over n tokens takes: measured at start, and updated by every step since."""

    def __init__(self, sweep: Sequence[tuple[int, float]]) -> None:
        """`sweep` holds measured pairs of (tokens, seconds), at least one."""
        self._tokens = [tokens for tokens, _ in sorted(sweep)]
        self._measured = [seconds for _, seconds in sorted(sweep)]
        self._fit()

    def seconds(self, tokens: int) -> float:
        """Return the expected duration of a pass over `tokens` tokens, in seconds; it never falls with more tokens."""
        if tokens > self._tokens[-1]:
            return self._table[-1] * tokens / self._tokens[-1]
        return self._table[tokens]

    def in_tokens(self, decoding: int, read: int) -> float:
        """Return the time that reading `read` prompt tokens adds to a pass, in tokens: those that `decoding` sessions
        would decode in that time. With no decoding session, count the tokens of one."""
        one = self.seconds(max(1, decoding)) / max(1, decoding)
        return (self.seconds(decoding + read) - self.seconds(decoding)) / one if read else 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Record that a pass over `tokens` took `seconds`. An outlier counts as at most twice the expected duration.

        The whole curve follows, because a slower machine is slower at every size; the neighbouring points follow more.
        """
        if tokens > self._tokens[-1]:
            return
        error = min(2.0, seconds / self.seconds(tokens)) - 1
        above = bisect_left(self._tokens, tokens)
        for index in range(len(self._measured)):
            self._measured[index] *= 1 + error * (NEARBY if above - 1 <= index <= above else EVERYWHERE)
        self._fit()

    def points(self) -> list[tuple[int, float]]:
        """Return the fitted curve at the measured points: pairs of (tokens, seconds)."""
        return list(zip(self._tokens, map(float, self._fitted), strict=True))

    def _fit(self) -> None:
        self._fitted = np.maximum.accumulate(self._measured)
        # Every number of tokens that a step may ask for: a step asks some hundred times.
        self._table: list[float] = np.interp(range(self._tokens[-1] + 1), self._tokens, self._fitted).tolist()


class VerificationBudget(NamedTuple):
    """The tree nodes that a step verifies, and its expected result."""

    nodes: int  # how many of the best nodes
    expected: float  # tokens that the step is expected to commit
    seconds: float  # expected, from the end of the step before to the end of this one
    price: float  # path score below which a node is not worth verifying


def choose_budget(
    scores: Sequence[float], base: int, certain: float, cost: CostModel, waited: float = 0.0
) -> VerificationBudget:
    """Choose n to maximise (certain + scores[:n].sum()) / (t(base + n) + overhead + waited).

    `scores` are the path scores of all candidate nodes over all sessions, best first. `base` is the number of tokens
    that the pass holds in any case. `certain` is the number of tokens that it commits in any case, one per session,
    plus its other work in tokens. `waited` are the seconds since the step before ended: they are part of the step's
    cost, so a step that waited longer should take more nodes.
    """
    overhead = OVERHEAD_S + waited
    best = VerificationBudget(0, float(certain), cost.seconds(base) + overhead, 1.0)
    expected = float(certain)
    for count, score in enumerate(scores, 1):
        expected += score
        seconds = cost.seconds(base + count) + overhead
        if expected * best.seconds > best.expected * seconds:
            best = VerificationBudget(count, expected, seconds, score)
    here = base + best.nodes
    slope = (cost.seconds(here + SLOPE_SPAN) - cost.seconds(here)) / SLOPE_SPAN
    return best._replace(price=min(1.0, slope * best.expected / best.seconds))
