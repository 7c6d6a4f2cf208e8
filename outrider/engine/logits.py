"""What a pass says: its logits row by row, and tokens that the engine has chosen from them itself."""

from __future__ import annotations

from typing import Protocol

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
