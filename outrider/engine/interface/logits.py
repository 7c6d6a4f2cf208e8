"""The result of a pass: logits row by row, and the tokens that the engine itself has chosen from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.core.sampling.logprobs import ScoredTokens, score
from outrider.core.sampling.sampler import Choice


class Logits(Protocol):
    """The rows of logits that the segments of a pass wanted, in order. Valid until the engine's next pass."""

    vocabulary: int

    def row(self, index: int) -> NDArray[np.float32]:
        """Return one row: [vocabulary]."""

    def choice(self, index: int) -> Choice | None:
        """Return the token chosen after that row; None where the pass got no `Draw` for it or chose none."""

    def best(self, index: int) -> BestTokens | None:
        """Return the leading tokens after that row, as many as `Engine.sample` was called for; None as for `choice`."""

    def score(self, rows: Sequence[int], tokens: Sequence[int], alternatives: int) -> ScoredTokens:
        """Return the log-probabilities of given tokens, one after each of some rows."""


class BestTokens(NamedTuple):
    """The leading tokens after a row, best first."""

    tokens: NDArray[np.int64]  # [count]
    scores: NDArray[np.float64]  # [count] log p / T + g up to a constant; at T = 0 log p


@dataclass(frozen=True, slots=True)
class LogitsRow:
    """One row of a pass's logits."""

    source: Logits
    index: int

    @property
    def logits(self) -> NDArray[np.float32]:
        """The row: [vocabulary]."""
        return self.source.row(self.index)

    @property
    def best(self) -> BestTokens | None:
        """The leading tokens after the row; see `Logits.best`."""
        return self.source.best(self.index)


def logits_rows(source: Logits, first: int, count: int) -> list[LogitsRow]:
    """Return `count` rows of `source`, from row `first` on."""
    return [LogitsRow(source, index) for index in range(first, first + count)]


class HostLogits:
    """Logits in host memory, of an engine that chooses no tokens."""

    def __init__(self, rows: NDArray[np.float32]) -> None:
        """`rows`: [rows, vocabulary]."""
        self.vocabulary = rows.shape[1]
        self._rows = rows

    def row(self, index: int) -> NDArray[np.float32]:
        row: NDArray[np.float32] = self._rows[index]
        return row

    def choice(self, index: int) -> Choice | None:
        return None

    def best(self, index: int) -> BestTokens | None:
        return None

    def score(self, rows: Sequence[int], tokens: Sequence[int], alternatives: int) -> ScoredTokens:
        return score(map(self.row, rows), tokens, alternatives)
