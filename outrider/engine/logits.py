"""What a pass says: its logits row by row, and tokens that the engine has chosen from them itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.core.sampler import Choice


class Logits(Protocol):
    """The rows that a pass was asked for, in order. Of use until the engine's next pass."""

    vocabulary: int

    def row(self, index: int) -> NDArray[np.float32]:
        """One row: [vocabulary]."""

    def choice(self, index: int) -> Choice | None:
        """The target's token after that row, where the engine was told how it is drawn and has drawn it."""

    def best(self, index: int) -> Best | None:
        """As many of the best tokens after that row as the engine was asked for, likewise."""


class Best(NamedTuple):
    """The leading tokens after a row, best first."""

    tokens: NDArray[np.int64]  # [count]
    scores: NDArray[np.float64]  # [count] log p / T + g up to a constant; at T = 0 log p


@dataclass(frozen=True, slots=True)
class Row:
    """One row of what a pass says."""

    said: Logits
    index: int

    @property
    def logits(self) -> NDArray[np.float32]:
        """[vocabulary]"""
        return self.said.row(self.index)

    @property
    def best(self) -> Best | None:
        """See `Logits.best`."""
        return self.said.best(self.index)


def rows_of(said: Logits, first: int, count: int) -> list[Row]:
    """Some neighbouring rows."""
    return [Row(said, index) for index in range(first, first + count)]


class HostLogits:
    """Logits that are here, of an engine that leaves choosing to others."""

    def __init__(self, rows: NDArray[np.float32]) -> None:
        """`rows`: [rows, vocabulary]."""
        self.vocabulary = rows.shape[1]
        self._rows = rows

    def row(self, index: int) -> NDArray[np.float32]:
        row: NDArray[np.float32] = self._rows[index]
        return row

    def choice(self, index: int) -> Choice | None:
        return None

    def best(self, index: int) -> Best | None:
        return None
