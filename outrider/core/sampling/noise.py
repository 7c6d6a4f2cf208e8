"""Shared noise: Gumbel noise that every party computes alike from (seed, choice, position, token).

The target's token at position t is argmax(log p_t + g_t), whatever was drafted. Two parties with the same logits
therefore choose the same token, and a drafter that ranks by log q_t + g_t proposes likely ones. See docs/protocol.md,
section 3, and Daliri et al., "Coupling without Communication and Drafter-Invariant Speculative Decoding", arXiv
2408.07978.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.core.sampling.restriction import Restriction
from outrider.core.session.contract import Contract
from outrider.core.session.digest import MASK, PHI, mix64

FloatRow = NDArray[np.float64]

_LARGEST_U = 1.0 - 2.0**-24  # bounds the noise from below at about -2.8


class Draw(NamedTuple):
    """How a generation draws tokens: of those that it may choose, the first with the largest log p / T + g."""

    base: int  # 64 bits, from which the generation's noise keys are made
    temperature: float  # 0: greedy, without noise
    restriction: Restriction | None = None  # None: all tokens, as the model weighs them


def generation_base(seed: int, choice: int) -> int:
    """Return the 64-bit number from which the noise keys of one generation are made."""
    return mix64(seed + choice * PHI)


def noise_keys(bases: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the noise keys of `positions`, each in the generation of the base at the same index: [positions]."""
    keys = positions.astype(np.uint64)
    keys *= np.uint64(PHI)
    keys += bases
    return _mixed(keys)


def noise_key(seed: int, choice: int, position: int) -> int:
    """Return the 64-bit key of one position's row of noise."""
    return mix64(generation_base(seed, choice) + position * PHI)


def noise_bits(key: int, first: int, count: int) -> NDArray[np.uint64]:
    """Return 32 random bits for each of `count` tokens from `first` on, identical on every machine: [count] uint64."""
    return _bits(key, np.arange(first + 1, first + count + 1, dtype=np.uint64))


def _bits(key: int, value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the noise bits of some tokens. `value` holds the token ids plus 1 and is overwritten."""
    value *= np.uint64(PHI)
    value += np.uint64(key & MASK)
    value = _mixed(value)
    value >>= np.uint64(32)
    return value


def _mixed(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply `mix64` to each value, in place."""
    value ^= value >> np.uint64(30)
    value *= np.uint64(0xBF58476D1CE4E5B9)
    value ^= value >> np.uint64(27)
    value *= np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    return value


def gumbel_row(seed: int, choice: int, position: int, vocabulary: int) -> FloatRow:
    """Return the standard Gumbel noise of one position, g = -log(-log(1 - u)): [vocabulary] float64, -2.8 to 22.9.

    u carries 32 bits and is small where the noise is large, so that large values keep their resolution; log1p preserves
    it through the logarithm.
    """
    return _gumbel(noise_bits(noise_key(seed, choice, position), 0, vocabulary))


def gumbel_at(seed: int, choice: int, position: int, tokens: NDArray[np.int64]) -> FloatRow:
    """Return the noise of `gumbel_row` for some tokens only: [tokens]."""
    return _gumbel(_bits(noise_key(seed, choice, position), tokens.astype(np.uint64) + np.uint64(1)))


def _gumbel(bits: NDArray[np.uint64]) -> FloatRow:
    u = bits.astype(np.float64)
    u += 0.5
    u *= 2.0**-32
    np.minimum(u, _LARGEST_U, out=u)
    np.negative(u, out=u)
    np.log1p(u, out=u)
    np.negative(u, out=u)
    np.log(u, out=u)
    np.negative(u, out=u)
    return u


class NoiseRows:
    """One generation's rows of noise, each computed once. A greedy generation has no noise."""

    def __init__(self, seed: int, choice: int, vocabulary: int, *, greedy: bool) -> None:
        self._seed = seed
        self._choice = choice
        self._vocabulary = vocabulary
        self._greedy = greedy
        self._rows: dict[int, FloatRow] = {}

    @classmethod
    def of(cls, contract: Contract, vocabulary: int) -> NoiseRows:
        """Return the noise rows of a contract's generation."""
        return cls(contract.seed, contract.choice, vocabulary, greedy=contract.greedy)

    def row(self, position: int) -> FloatRow | None:
        """Return the noise of `position`, [vocabulary] float64, or None at temperature 0, where the noise is zero."""
        if self._greedy:
            return None
        row = self._rows.get(position)
        if row is None:
            row = self._rows[position] = gumbel_row(self._seed, self._choice, position, self._vocabulary)
        return row

    def forget_below(self, position: int) -> None:
        """Free the rows of positions below `position`, which are committed."""
        for known in [known for known in self._rows if known < position]:
            del self._rows[known]
