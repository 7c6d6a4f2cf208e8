"""Token choice in compiled code, where the module is installed: `Sampler` with numpy takes ten times as long.

Both choose the same tokens. Where two scores, or a bound of top-p or min-p, are so close that a library's rounding of
logarithms could decide, the compiled code leaves the row to numpy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.core.sampling.filters import FloatRow, best_of, ids_within
from outrider.core.sampling.noise import generation_base
from outrider.core.session.contract import Contract

try:
    from outrider import _native
except ImportError:  # the package was installed without a compiler
    _native = None  # type: ignore[assignment]

_NO_BIAS = np.empty(0)


class CompiledSampler:
    """The compiled part of a `Sampler`; the constructor's parameters are those of `Sampler`."""

    def __init__(self, contract: Contract, vocabulary: int, tokens: Sequence[int], answer_position: int) -> None:
        biased = ids_within([token for token, _ in contract.logit_bias], vocabulary)  # ascending, as all lists of ids
        bias = np.array([by for _, by in contract.logit_bias[: biased.size]]) if biased.size else _NO_BIAS
        self._sampler = _native.Sampler(
            vocabulary,
            generation_base(contract.seed, contract.choice),
            contract.temperature,
            contract.top_k,
            contract.top_p,
            contract.min_p,
            (contract.repetition_penalty, contract.presence_penalty, contract.frequency_penalty),
            biased,
            bias,
            ids_within(contract.banned_ids, vocabulary),
            ids_within(contract.allowed_ids, vocabulary),
            bool(contract.allowed_ids),
            ids_within(contract.stop_ids, vocabulary),
            answer_position + contract.min_tokens,
        )
        self._vocabulary = vocabulary
        self._sampler.extend(np.array(tokens[:answer_position], np.int64), False)
        self.extend(tokens[answer_position:])

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens of the answer."""
        self._sampler.extend(np.array(tokens, np.int64), True)

    def leading(
        self, logits: NDArray[np.float32], path: Sequence[int], count: int, *, noised: bool
    ) -> tuple[NDArray[np.int64], FloatRow] | None:
        """Return what `Sampler.leading` returns, or None where numpy must decide."""
        count = min(count, self._vocabulary)
        tokens, scores = np.empty(count, np.int64), np.empty(count)
        row = np.ascontiguousarray(logits, np.float32)
        found = self._sampler.lead(row, np.array(path, np.int64), noised, tokens, scores)
        return None if found < 0 else (tokens[:found], scores[:found])


def compiled_sampler(
    contract: Contract, vocabulary: int, tokens: Sequence[int], answer_position: int
) -> CompiledSampler | None:
    """Return a compiled sampler for one generation, or None where there is no compiled module."""
    return None if _native is None else CompiledSampler(contract, vocabulary, tokens, answer_position)


def log_total(logits: NDArray[np.float32], count: int) -> tuple[NDArray[np.int64], FloatRow, float]:
    """Return the `count` best tokens and their logits, best first, and the logarithm of the sum of exp(logits)."""
    if _native is None:
        maximum, (tokens, scores) = logits.max(), best_of(logits, count)
        return (
            tokens,
            scores.astype(np.float64),
            float(maximum + np.log(np.exp(logits - maximum).sum(dtype=np.float64))),
        )
    tokens, scores = np.full(count, -1), np.empty(count)
    total = _native.logprobs(np.ascontiguousarray(logits, np.float32), tokens, scores)
    found = tokens >= 0
    return tokens[found], scores[found], total
