"""Use of the shared noise by sources without a model: it improves the probabilities of the next token.

A source knows probabilities, not logits. A probability of 0.8 can mean that in four of five such positions the target
is certain of the token, or that the target is uncertain at each of them. In the first case the noise has no influence;
in the second the noise decides: the token is the first by log c + g, as for a draft model, where c are the source's
probabilities. So a token's probability is a mixture of the two cases, whose weight is learned from the target's tokens.
A token that the source did not find may still be chosen, where the noise favours it and it is frequent in the session.

The noise is used only at the root, and only where the source is uncertain. Measured with `python -m bench.trees`
(thirty prompts, acceptance length, against the source's probabilities alone, paired, +- 0.03 at most), at 4 and at 16
nodes: prompt lookup +0.16 and +0.30 at temperature 1, +0.10 and +0.24 at 0.6, +0.05 and +0.13 at 0.3; suffix index
+0.12 and +0.21, +0.06 and +0.12, +0.03 and +0.06. With noise at every node of the tree the change was -0.19 +- 0.16 at
temperature 0.6 and 16 nodes, because it adds width where depth is worth more. Only tokens of the session are
considered, so the cost does not grow with the vocabulary: about 0.1 ms a step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.core.construction.expansion import Candidates, ScaleFit, candidates
from outrider.core.sampling.filters import FloatRow
from outrider.core.stats import LONG, FadingRatio

MIN_CHANCE = 1e-9  # lower bound of a probability before its logarithm is taken

Found = Mapping[int, float]  # tokens and their probabilities


@dataclass(frozen=True, slots=True)
class NoiseTuning:
    """Where the noise is used."""

    bounds: tuple[float, float] = (0.3, 0.6)  # of the classes of positions, by the largest probability found
    max_total: float = 0.995  # largest sum of the probabilities of all found tokens
    prior: float = 8.0  # observations that the initial weight of 1/2 counts as
    min_share: float = 0.1  # noise share below which the noise is tried only seldom
    trial_interval: int = 16  # positions, one of which is then tried


NOISE = NoiseTuning()


class BackgroundDistribution:
    """The frequencies of a session's tokens. A token that a source did not find is mostly one of these."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}  # index of each token in the arrays
        self._tokens = np.zeros(256, np.int64)
        self._counts = np.zeros(256)
        self._total = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Count committed tokens."""
        for token in tokens:
            place = self._place(token)  # this may replace the arrays
            self._counts[place] += 1.0
        self._total += len(tokens)

    def frequency(self, token: int) -> float:
        """Return the share of the session's tokens that equal `token`, 0 to 1."""
        place = self._places.get(token)
        return 0.0 if place is None else float(self._counts[place]) / self._total

    def leading(self, found: Found, noise: Callable[[NDArray[np.int64]], FloatRow]) -> Candidates:
        """Return the best tokens by log q + g, where q holds the found probabilities and spreads the rest over the
        session's tokens. `noise` returns g of some tokens. The session must not be empty."""
        places = {self._place(token): chance for token, chance in found.items()}
        total, known = sum(found.values()), len(self._places)
        q = self._counts[:known] * ((1.0 - min(total, NOISE.max_total)) / self._total)
        for place, chance in places.items():
            q[place] += chance * min(1.0, NOISE.max_total / total) if total else 0.0
        tokens = self._tokens[:known]
        row = candidates(np.log(np.maximum(q, MIN_CHANCE)) + noise(tokens))
        return Candidates(tokens[row.tokens], row.scores)

    def _place(self, token: int) -> int:
        """Return the token's index in the arrays, adding the token if needed."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._tokens[place] = token
        return place


class NoiseMixtureFit:
    """The mixture's weight, by how certain the source is, and the scale of the noise; for one class of contracts.

    The weight is the noise's average share of the probability of the target's token. Where the weight is below
    `NOISE.min_share`, the noise is used only at one of `NOISE.trial_interval` positions. These are no trials of
    `outrider.core.control.trials`: the cost of a position is fixed, so a share of the positions bounds it.
    """

    def __init__(self) -> None:
        self._scale = ScaleFit(1.1)
        prior = NOISE.prior
        self._shares = [FadingRatio(LONG, hits=prior / 2, attempts=prior) for _ in NOISE.bounds]  # by class
        self._known = FadingRatio(LONG, hits=prior, attempts=prior)  # positions whose token was a leading one
        self._passed = 0  # positions since the last trial where the noise was not used

    def share(self, found: Found) -> float:
        """Return the noise's weight in the mixture, 0 to 1."""
        kind = _kind(found)
        return self._shares[kind].ratio if kind < len(NOISE.bounds) else 0.0

    def wanted(self, found: Found) -> bool:
        """Return whether to use the noise at this position. Call once for each position."""
        if _kind(found) == len(NOISE.bounds):
            return False
        if self.share(found) >= NOISE.min_share:
            return True
        self._passed = (self._passed + 1) % NOISE.trial_interval
        return self._passed == 0

    def mixed(self, found: Found, row: Candidates, width: int) -> dict[int, float]:
        """Return the probability of each found token and of the best others, at most `width` unless more were found.

        `row` holds the leading tokens by log q + g.
        """
        share, by_noise = self.share(found), self._by_noise(row)
        chances = {token: (1.0 - share) * chance for token, chance in found.items()}
        for token, chance in by_noise.items():  # best first
            if token in chances or len(chances) < width:
                chances[token] = chances.get(token, 0.0) + share * chance
        return chances

    def observe(self, found: Found, row: Candidates, token: int, frequency: float) -> None:
        """Learn that the target chose `token`, whose share of the session's tokens is `frequency`: each part of the
        mixture earns its part of the token's probability."""
        kind, share = _kind(found), self.share(found)
        noised = share * self._by_noise(row).get(token, 0.0)
        plain = (1.0 - share) * (found.get(token, 0.0) + max(0.0, 1.0 - sum(found.values())) * frequency)
        if noised + plain > 0.0:
            self._shares[kind].observe(noised / (noised + plain))
        self._scale.observe(row, token)
        self._known.observe(bool((row.tokens == token).any()))

    def _by_noise(self, row: Candidates) -> dict[int, float]:
        """Return the probability of each leading token if the target is uncertain everywhere, best first."""
        chances = np.exp(self._scale.relative(row))
        chances *= self._known.ratio / chances.sum()
        return dict(zip(row.tokens.tolist(), chances.tolist(), strict=True))


def _kind(found: Found) -> int:
    """Return the class of a position: where a source is certain, the target is mostly certain, too."""
    return bisect_right(NOISE.bounds, max(found.values(), default=0.0))
