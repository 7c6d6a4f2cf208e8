"""What turns logits into the distribution to sample from: temperature, then top-k, then top-p."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.core.contract import Contract

FloatRow = NDArray[np.float64]


def filtered(logits: NDArray[np.float32], contract: Contract) -> FloatRow:
    """Log-probabilities up to a constant; tokens that the filters exclude are -inf. [vocabulary] float64

    At temperature 0 the logits come back as they are: filters cannot change an argmax.
    """
    scores = logits.astype(np.float64)
    if contract.greedy:
        return scores
    scores /= contract.temperature
    if 0 < contract.top_k < scores.size:
        keep_top_k(scores, contract.top_k)
    if contract.top_p < 1.0:
        keep_top_p(scores, contract.top_p)
    return scores


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
