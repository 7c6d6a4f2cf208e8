"""What shared noise says about the token that comes next, beside a source without a model.

A source knows chances, not logits. That a token follows with chance 0.8 can mean that in four of five such places the
target has no doubt, or that it is in doubt at each of them. In the first case the noise tells nothing of the token; in
the second it decides: the token is the first by log c + g, as for a draft model (DESIGN, section 2, "Scores"). So a
chance is a mixture of the two, its weight learned from what the target said. And what the source did not find at all
may still be the token, where the noise favours it and the text says it often.

That is asked at the root alone, and there where the source is not sure. Measured in terms of `python -m bench.trees`
(thirty prompts, acceptance length, against the chances alone, paired, +- 0.03 at most), at 4 and at 16 nodes: prompt
lookup +0.16 and +0.30 at temperature 1, +0.10 and +0.24 at 0.6, +0.05 and +0.13 at 0.3; suffix index +0.12 and +0.21,
+0.06 and +0.12, +0.03 and +0.06. At every node of the tree it was -0.19 +- 0.16 at 0.6 and 16 nodes: width where chains
are worth more. Only tokens that the session has said are looked at, so the cost does not grow with the vocabulary:
about 0.1 ms a step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.core.filters import FloatRow
from outrider.core.growth import Candidates, ScaleFit, candidates

MOST = 0.995  # of the chance that all that was found may have together
PRIOR = 8.0  # observations' worth of trust in an even mixture
MEMORY = 0.995  # weight of the past at each observation
LEAST_CHANCE = 1e-9
SURE = 0.6  # chance of a found token from which on the noise is not asked
BOUNDS = (0.3, SURE)  # of the classes of places, by the largest chance that was found
LEAST = 0.1  # share below which the noise has been of no use
SELDOM = 16  # places of which one is tried then

Found = Mapping[int, float]  # tokens and their chances


class Background:
    """How often a session's tokens were said: what a source did not find is mostly among them."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}  # of tokens in the arrays
        self._tokens = np.zeros(256, np.int64)
        self._counts = np.zeros(256)
        self._total = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """These were said."""
        for token in tokens:
            place = self._place(token)  # which may be in a new array
            self._counts[place] += 1.0
        self._total += len(tokens)

    def usual(self, token: int) -> float:
        """The share of what was said that this token has."""
        place = self._places.get(token)
        return 0.0 if place is None else float(self._counts[place]) / self._total

    def leading(self, found: Found, noise: Callable[[NDArray[np.int64]], FloatRow]) -> Candidates:
        """The best by log q + g of a draft that has the chances found and leaves the rest to the background. `noise`
        gives g of some tokens. Something must have been said."""
        places = {self._place(token): chance for token, chance in found.items()}
        total, known = sum(found.values()), len(self._places)
        q = self._counts[:known] * ((1.0 - min(total, MOST)) / self._total)
        for place, chance in places.items():
            q[place] += chance * min(1.0, MOST / total) if total else 0.0
        tokens = self._tokens[:known]
        row = candidates(np.log(np.maximum(q, LEAST_CHANCE)) + noise(tokens))
        return Candidates(tokens[row.tokens], row.scores)

    def _place(self, token: int) -> int:
        """Where the token is; it is added if it is not known."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._tokens[place] = token
        return place


class NoisedFit:
    """The mixture's weight, by how sure the source is, and the scale of its second part; for one class of contracts.

    The weight is the noise's share of what the target's tokens were believed to be. Where it has fallen so low that the
    noise is of no use, it is asked seldom.
    """

    def __init__(self) -> None:
        self._scale = ScaleFit(1.1)
        self._noised = [PRIOR / 2] * len(BOUNDS)
        self._of = [PRIOR] * len(BOUNDS)
        self._known = self._asked = PRIOR  # how often the token was among the leading ones
        self._passed = 0  # places where it was of no use, since the last trial

    def share(self, found: Found) -> float:
        """How much of the belief is due to the noise, 0 to 1."""
        kind = _kind(found)
        return self._noised[kind] / self._of[kind] if kind < len(BOUNDS) else 0.0

    def wanted(self, found: Found) -> bool:
        """Whether the noise shall be asked at this place; each place is to be asked for once."""
        if _kind(found) == len(BOUNDS):
            return False
        if self.share(found) >= LEAST:
            return True
        self._passed = (self._passed + 1) % SELDOM
        return self._passed == 0

    def mixed(self, found: Found, row: Candidates, width: int) -> dict[int, float]:
        """The chance of each token that was found and of the best others, at most `width` in all unless more were
        found. `row`: the leading tokens by log q + g of the source's draft."""
        share, by_noise = self.share(found), self._by_noise(row)
        chances = {token: (1.0 - share) * chance for token, chance in found.items()}
        for token, chance in by_noise.items():  # best first
            if token in chances or len(chances) < width:
                chances[token] = chances.get(token, 0.0) + share * chance
        return chances

    def observe(self, found: Found, row: Candidates, token: int, usual: float) -> None:
        """The target said `token` there, which is said with a chance of `usual` wherever: each part of the mixture
        earns its part of that token's chance."""
        kind, share = _kind(found), self.share(found)
        noised = share * self._by_noise(row).get(token, 0.0)
        plain = (1.0 - share) * (found.get(token, 0.0) + max(0.0, 1.0 - sum(found.values())) * usual)
        if noised + plain > 0.0:
            self._noised[kind] = MEMORY * self._noised[kind] + noised / (noised + plain)
            self._of[kind] = MEMORY * self._of[kind] + 1.0
        self._scale.observe(row, token)
        self._known = MEMORY * self._known + bool((row.tokens == token).any())
        self._asked = MEMORY * self._asked + 1.0

    def _by_noise(self, row: Candidates) -> dict[int, float]:
        """The chance of each leading token if the target is in doubt everywhere, best first."""
        chances = np.exp(self._scale.relative(row))
        chances *= self._known / self._asked / chances.sum()
        return dict(zip(row.tokens.tolist(), chances.tolist(), strict=True))


def _kind(found: Found) -> int:
    """The class of a place: a source that is sure is so mostly where the target has no doubt."""
    return bisect_right(BOUNDS, max(found.values(), default=0.0))
