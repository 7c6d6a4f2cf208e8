"""Drawing a node's children for the rules that hold p against q, and the q that goes with them.

What is exact is the q that was really drawn from: the draft's distribution cut to its likeliest tokens and rounded to
integers. That one is drawn from, sent, and held against p.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outrider.core.filters import FloatRow
from outrider.core.rules.chance import Chance

LARGEST_WEIGHT = 65535
MOST_TOKENS = 512  # of a row
MASS = 0.99  # that a row holds, if so many tokens do; the rest of the vocabulary counts as none


@dataclass(frozen=True, slots=True)
class SparseRow:
    """A distribution over a few tokens: each one's weight over the sum of all."""

    tokens: tuple[int, ...]  # ascending
    weights: tuple[int, ...]  # 1 to 65535

    @classmethod
    def of(cls, p: FloatRow, most: int = MOST_TOKENS, mass: float = MASS) -> SparseRow:
        """The likeliest tokens of a distribution [vocabulary], until they have that much of it; at most so many.

        Of a flat distribution 64 tokens are too few: of the reference drafters they hold three quarters at temperature
        1, and with so much left out the chance that p and q agree falls from 0.85 to 0.69.
        """
        best = np.argsort(-p, kind="stable")[:most]
        best = np.sort(best[: 1 + int(np.searchsorted(np.cumsum(p[best]), mass))])
        weights = np.rint(p[best] / p[best].max() * LARGEST_WEIGHT).astype(np.int64)
        kept = weights > 0
        return cls(tuple(best[kept].tolist()), tuple(weights[kept].tolist()))

    def dense(self, vocabulary: int) -> FloatRow:
        """The distribution: [vocabulary], sum 1."""
        row = np.zeros(vocabulary)
        row[list(self.tokens)] = self.weights
        row /= row.sum()
        return row

    def draw(self, count: int, chance: Chance) -> list[int]:
        """At most `count` tokens, one after the other without replacement."""
        left = np.array(self.weights, np.float64)
        drawn: list[int] = []
        while len(drawn) < min(count, len(self.tokens)):
            index = chance.pick(left)
            left[index] = 0.0
            drawn.append(self.tokens[index])
        return drawn
