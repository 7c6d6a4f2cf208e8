"""What turns logits into the distribution to sample from, in the order of `transformers`: bias, penalties, bans; then,
unless greedy, temperature, top-k, top-p, min-p."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.core.contract import Contract

FloatRow = NDArray[np.float64]
FloatT = TypeVar("FloatT", bound=np.floating[Any])


class History:
    """How often each token was said: what penalties go by. Ids outside the vocabulary are not counted."""

    def __init__(self, vocabulary: int, tokens: Sequence[int], answer_position: int) -> None:
        """`tokens`: of the session so far, the answer's beginning at that position."""
        self.session, self.answer = (
            np.bincount(ids_within(part, vocabulary), minlength=vocabulary)  # [vocabulary]
            for part in (tokens, tokens[answer_position:])
        )

    def extend(self, tokens: Sequence[int], times: int = 1) -> None:
        """The answer goes on."""
        known = ids_within(tokens, self.session.size)
        for counts in (self.session, self.answer):
            np.add.at(counts, known, times)

    @contextmanager
    def following(self, path: Sequence[int]) -> Iterator[None]:
        """As if the answer went on with these tokens."""
        self.extend(path)
        try:
            yield
        finally:
            self.extend(path, -1)


def ids_within(ids: Sequence[int], vocabulary: int) -> NDArray[np.int64]:
    """Those of the ids that a vocabulary of that size has, in their order."""
    every = np.asarray(ids, np.int64)
    return every[every < vocabulary]


def penalize(scores: FloatRow, contract: Contract, history: History) -> None:
    """Lowers, in place, the logits of what was said.

    Sources: Keskar et al., "CTRL", arXiv 1909.05858, section 4.1 (repetition; negative logits are multiplied, as in
    `transformers`); presence and frequency as OpenAI's API documents them.
    """
    if contract.repetition_penalty != 1.0:
        said = np.flatnonzero(history.session)
        logits = scores[said]
        scores[said] = np.where(logits < 0, logits * contract.repetition_penalty, logits / contract.repetition_penalty)
    if contract.presence_penalty or contract.frequency_penalty:
        said = np.flatnonzero(history.answer)
        scores[said] -= contract.presence_penalty + contract.frequency_penalty * history.answer[said]


def keep_sampled(scores: FloatRow, contract: Contract) -> None:
    """Divides by the temperature and excludes, in place, what is not to be sampled."""
    scores /= contract.temperature
    if 0 < contract.top_k < scores.size:
        keep_top_k(scores, contract.top_k)
    if contract.top_p < 1.0:
        keep_top_p(scores, contract.top_p)
    if contract.min_p > 0.0:
        keep_min_p(scores, contract.min_p)


def keep_top_k(scores: FloatRow, k: int) -> None:
    """Excludes, in place, all that score below the k-th best; ties with it stay."""
    threshold = np.partition(scores, scores.size - k)[scores.size - k]
    scores[scores < threshold] = -np.inf


def keep_top_p(scores: FloatRow, p: float) -> None:
    """Keeps, in place, the smallest set of best tokens whose probability reaches p; lower ids first among ties.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", section 3.1.
    """
    order = np.argsort(-scores, kind="stable")
    probability = np.exp(scores[order] - scores[order[0]])
    cumulative = np.cumsum(probability)
    kept = int(np.searchsorted(cumulative, p * cumulative[-1])) + 1
    scores[order[kept:]] = -np.inf


def best_of(scores: NDArray[FloatT], count: int) -> tuple[NDArray[np.int64], NDArray[FloatT]]:
    """The `count` best tokens and their scores, best first, lower ids first among equals; fewer where fewer have one:
    what is -inf may not be said."""
    count = min(count, scores.size)
    least = np.partition(scores, -count)[-count]
    best = np.flatnonzero(scores >= least)
    best = best[np.argsort(-scores[best], kind="stable")][:count]
    best = best[np.isfinite(scores[best])]
    return best, scores[best]


def keep_min_p(scores: FloatRow, p: float) -> None:
    """Keeps, in place, tokens with at least a share p of the likeliest one's probability.

    Source: Nguyen et al., "Turning Up the Heat: Min-p Sampling", arXiv 2407.01082, section 3.
    """
    scores[scores < scores.max() + np.log(p)] = -np.inf
