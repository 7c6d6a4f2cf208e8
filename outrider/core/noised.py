"""What shared noise says about the tokens that a source without a model proposes.

A source knows chances, not logits. That a token follows with chance 0.8 can mean that in four of five such places the
target has no doubt, or that it is in doubt at each of them. In the first case the noise tells nothing of the token; in
the second it decides: the token is the first by log c + g, as for a draft model (DESIGN, section 2, "Scores"). So a
score is a mixture of the two, its weight learned from what the target said.

The weight has classes by the largest chance found: where a source is sure, the target mostly has no doubt.

Measured with `python -m bench.trees` (eight prompts, acceptance length at 16 nodes, against the chances alone): at
temperature 1 suffix index 1.11 -> 1.54, prompt lookup 1.09 -> 1.55; at 0.6 2.89 -> 2.67 and 2.88 -> 2.27, +- 0.9: there
one text that loops decides, and what was learned from texts that do not loop spends nodes on width.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.core.filters import FloatRow
from outrider.core.growth import ScaleFit, candidates
from outrider.core.tree import edge_code, edge_from_code

MOST = 0.995  # of the chance that all that was found may have together
PRIOR = 8.0  # observations' worth of trust in an even mixture
MEMORY = 0.995  # weight of the past at each observation

BOUNDS = (0.3, 0.6, 0.85)  # of the classes of places, by the largest chance that was found

Scored = Sequence[tuple[int, float]]  # tokens and the logarithms of their chances


class Background:
    """How often tokens are said at all: what a source did not find is among them."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self._counts = np.full(vocabulary, 0.5)

    def extend(self, tokens: Sequence[int]) -> None:
        """These were said."""
        np.add.at(self._counts, np.asarray(tokens, np.int64), 1.0)

    def logits(self, found: Scored, temperature: float) -> NDArray[np.float32]:
        """The logits [vocabulary] of a draft that has these chances at a temperature above 0 and leaves the rest to the
        background. A sampler's filters and noise may act on them as on a model's."""
        q = np.zeros(len(self._counts))
        for token, chance in found:
            q[token] += math.exp(chance)
        total = float(q.sum())
        if total > MOST:
            q *= MOST / total
        q += (1.0 - min(total, MOST)) * self._counts / self._counts.sum()
        logits: NDArray[np.float32] = (temperature * np.log(q)).astype(np.float32)
        return logits


class NoisedFit:
    """The mixture's weight, by how sure the source is, and the scale of its second part; for one source and class of
    temperatures."""

    def __init__(self) -> None:
        self._scale = ScaleFit(1.1)
        self._noised = [PRIOR / 2] * (len(BOUNDS) + 1)
        self._of = [PRIOR] * (len(BOUNDS) + 1)

    def share(self, found: Scored) -> float:
        """How much of the belief is due to the noise, 0 to 1."""
        kind = _kind(found)
        return self._noised[kind] / self._of[kind]

    def edges(self, found: Scored, scores: FloatRow, width: int) -> list[tuple[int, float]]:
        """The best `width` tokens and the logarithm of each one's chance, best first, as the wire can carry it.

        `scores`: log q + g of the source's draft, [vocabulary].
        """
        by_noise, share = self._by_noise(scores), self.share(found)
        plain = {token: math.exp(chance) for token, chance in found}
        mixed = [
            (token, share * by_noise.get(token, 0.0) + (1.0 - share) * plain.get(token, 0.0))
            for token in by_noise.keys() | plain.keys()
            if np.isfinite(scores[token])
        ]
        best = sorted(mixed, key=lambda each: (-each[1], each[0]))[:width]
        return [(token, edge_from_code(edge_code(math.log(max(chance, 1e-9))))) for token, chance in best]

    def observe(self, found: Scored, scores: FloatRow, token: int) -> None:
        """The target said `token` there: each part of the mixture earns its part of that token's chance."""
        kind, share = _kind(found), self.share(found)
        noised = share * self._by_noise(scores).get(token, 0.0)
        plain = (1.0 - share) * sum(math.exp(chance) for each, chance in found if each == token)
        if noised + plain > 0.0:
            self._noised[kind] = MEMORY * self._noised[kind] + noised / (noised + plain)
            self._of[kind] = MEMORY * self._of[kind] + 1.0
        self._scale.observe(candidates(scores), token)

    def _by_noise(self, scores: FloatRow) -> dict[int, float]:
        """The chance of each leading token if the target is in doubt everywhere."""
        row = candidates(scores)
        chances = np.exp(self._scale.relative(row))
        return dict(zip(row.tokens.tolist(), (chances / chances.sum()).tolist(), strict=True))


def _kind(found: Scored) -> int:
    """The class of a place: a source that is sure is so mostly where the target has no doubt."""
    return bisect_right(BOUNDS, math.exp(max((chance for _, chance in found), default=-math.inf)))
