"""The filters that turn logits into the distribution to sample from, in the order of `transformers`.

The order is bias, penalties, bans; then, unless greedy, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.core.session.contract import Contract

FloatRow = NDArray[np.float64]
FloatT = TypeVar("FloatT", bound=np.floating[Any])


class Occurrences:
    """Counts how often each token occurs, for the penalties. Ids outside the vocabulary are not counted."""

    def __init__(self, vocabulary: int, tokens: Sequence[int], answer_position: int) -> None:
        """Count `tokens`, those of the session so far. The answer begins at `answer_position`."""
        self.session, self.answer = (
            np.bincount(ids_within(part, vocabulary), minlength=vocabulary)  # [vocabulary]
            for part in (tokens, tokens[answer_position:])
        )

    def extend(self, tokens: Sequence[int], times: int = 1) -> None:
        """Count tokens that are appended to the answer, each `times` times."""
        known = ids_within(tokens, self.session.size)
        for counts in (self.session, self.answer):
            np.add.at(counts, known, times)

    @contextmanager
    def following(self, path: Sequence[int]) -> Iterator[None]:
        """Count, within the context, as if the answer continued with the tokens of `path`."""
        self.extend(path)
        try:
            yield
        finally:
            self.extend(path, -1)


def ids_within(ids: Sequence[int], vocabulary: int) -> NDArray[np.int64]:
    """Return the ids below `vocabulary`, in their order."""
    every = np.asarray(ids, np.int64)
    return every[every < vocabulary]


def penalize(scores: FloatRow, contract: Contract, history: Occurrences) -> None:
    """Lower, in place, the logits of tokens that occurred before.

    Sources: Keskar et al., "CTRL", arXiv 1909.05858, section 4.1 (repetition; negative logits are multiplied, as in
    `transformers`); presence and frequency as OpenAI's API documents them.
    """
    if contract.repetition_penalty != 1.0:
        seen = np.flatnonzero(history.session)
        logits = scores[seen]
        scores[seen] = np.where(logits < 0, logits * contract.repetition_penalty, logits / contract.repetition_penalty)
    if contract.presence_penalty or contract.frequency_penalty:
        seen = np.flatnonzero(history.answer)
        scores[seen] -= contract.presence_penalty + contract.frequency_penalty * history.answer[seen]


def keep_sampled(scores: FloatRow, contract: Contract) -> None:
    """Divide by the temperature, in place, and set to -inf the tokens that top-k, top-p and min-p exclude."""
    scores /= contract.temperature
    if 0 < contract.top_k < scores.size:
        keep_top_k(scores, contract.top_k)
    if contract.top_p < 1.0:
        keep_top_p(scores, contract.top_p)
    if contract.min_p > 0.0:
        keep_min_p(scores, contract.min_p)


def keep_top_k(scores: FloatRow, k: int) -> None:
    """Set to -inf, in place, all scores below the k-th best; ties with the k-th best stay."""
    threshold = np.partition(scores, scores.size - k)[scores.size - k]
    scores[scores < threshold] = -np.inf


def keep_top_p(scores: FloatRow, p: float) -> None:
    """Keep, in place, the smallest set of best tokens whose probability reaches p; lower ids first among ties.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", section 3.1.
    """
    order = np.argsort(-scores, kind="stable")
    probability = np.exp(scores[order] - scores[order[0]])
    cumulative = np.cumsum(probability)
    kept = int(np.searchsorted(cumulative, p * cumulative[-1])) + 1
    scores[order[kept:]] = -np.inf


def best_of(scores: NDArray[FloatT], count: int) -> tuple[NDArray[np.int64], NDArray[FloatT]]:
    """Return the `count` best tokens and their scores, best first, lower ids first among equals.

    Tokens with score -inf are excluded, so there may be fewer.
    """
    count = min(count, scores.size)
    threshold = np.partition(scores, -count)[-count]
    best = np.flatnonzero(scores >= threshold)
    best = best[np.argsort(-scores[best], kind="stable")][:count]
    best = best[np.isfinite(scores[best])]
    return best, scores[best]


def keep_min_p(scores: FloatRow, p: float) -> None:
    """Keep, in place, the tokens with at least a share p of the likeliest one's probability.

    Source: Nguyen et al., "Turning Up the Heat: Min-p Sampling", arXiv 2407.01082, section 3.
    """
    scores[scores < scores.max() + np.log(p)] = -np.inf
