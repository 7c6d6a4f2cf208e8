"""The distribution q from which a node's children are drawn, for the rules that compare p with q.

q is the draft model's distribution, cut to its likeliest tokens and rounded to integers. The drafter draws from exactly
this q and sends it, and the verifier compares p with it, so that rounding costs no exactness.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outrider.core.acceptance.rng import RandomSource
from outrider.core.sampling.filters import FloatRow

LARGEST_WEIGHT = 65535
MAX_TOKENS = 512  # tokens of a row at most
MASS = 0.99  # probability that a row covers, if MAX_TOKENS tokens suffice; all other tokens get 0


@dataclass(frozen=True, slots=True)
class SparseRow:
    """A distribution over a few tokens. A token's probability is its weight over the sum of the weights."""

    tokens: tuple[int, ...]  # ascending
    weights: tuple[int, ...]  # 1 to 65535

    @classmethod
    def of(cls, p: FloatRow, max_tokens: int = MAX_TOKENS, mass: float = MASS) -> SparseRow:
        """Return the likeliest tokens of `p` [vocabulary] until they cover `mass`, at most `max_tokens` of them.

        For a flat distribution 64 tokens are too few: at temperature 1 they cover three quarters of the reference
        drafters' distributions, and the probability that p and q agree falls from 0.85 to 0.69.
        """
        best = np.argsort(-p, kind="stable")[:max_tokens]
        best = np.sort(best[: 1 + int(np.searchsorted(np.cumsum(p[best]), mass))])
        weights = np.rint(p[best] / p[best].max() * LARGEST_WEIGHT).astype(np.int64)
        kept = weights > 0
        return cls(tuple(best[kept].tolist()), tuple(weights[kept].tolist()))

    def dense(self, vocabulary: int) -> FloatRow:
        """Return the distribution: [vocabulary], sum 1."""
        row = np.zeros(vocabulary)
        row[list(self.tokens)] = self.weights
        row /= row.sum()
        return row

    def draw(self, count: int, rng: RandomSource) -> list[int]:
        """Draw at most `count` tokens, one after the other, without replacement."""
        left = np.array(self.weights, np.float64)
        drawn: list[int] = []
        while len(drawn) < min(count, len(self.tokens)):
            index = rng.pick(left)
            left[index] = 0.0
            drawn.append(self.tokens[index])
        return drawn
