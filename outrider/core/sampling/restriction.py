"""What of a contract, beside seed and temperature, counts for a token's choice in the same way at every position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from outrider.core.session.contract import Contract


@dataclass(frozen=True, slots=True, eq=False)
class Restriction:
    """Bias, bans, and unless greedy the filters of unlikely tokens; see `outrider.core.sampling.filters`. And the
    log-probabilities that are wanted."""

    top_k: int  # 0 keeps all
    top_p: float  # 1 keeps all
    min_p: float  # 0 keeps all
    tokens: NDArray[np.int64]  # whose logits change
    added: NDArray[np.float64]  # to their logits; -inf: banned
    only: bool  # whether all other tokens are banned
    logprobs: int | None  # alternatives with log-probabilities beside the token's own; None: none at all

    @classmethod
    def of(cls, contract: Contract, vocabulary: int) -> Self | None:
        """Return a contract's restriction, None where there is none."""
        if contract.unrestricted:
            return None
        added = dict(_added(contract, vocabulary))
        filters = (0, 1.0, 0.0) if contract.greedy else (contract.top_k, contract.top_p, contract.min_p)
        tokens, values = np.array([*added], np.int64), np.array([*added.values()], np.float64)
        return cls(*filters, tokens, values, bool(contract.allowed_ids), contract.logprobs)


def _added(contract: Contract, vocabulary: int) -> Iterator[tuple[int, float]]:
    """Yield tokens and what is added to their logits; of a token's pairs the last one counts."""
    allowed = set(contract.allowed_ids)
    yield from ((token, 0.0) for token in contract.allowed_ids if token < vocabulary)
    yield from (pair for pair in contract.logit_bias if pair[0] < vocabulary and (not allowed or pair[0] in allowed))
    yield from ((token, -np.inf) for token in contract.banned_ids if token < vocabulary)
