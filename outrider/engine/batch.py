"""The input of a forward pass: the new rows of each session, which one pass computes together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows that one session adds to a packed pass.

    The n new rows are the last of the m cache rows behind the prefix. The pass writes their keys and values to rows
    prefix + m - n to prefix + m of the slot.
    """

    slot: int
    prefix: int  # cache rows [0, prefix) of the slot are visible to all rows of the segment
    tokens: NDArray[np.int64]  # [n]
    positions: NDArray[np.int64]  # [n] absolute positions (RoPE)
    # [n, m], m >= n: which of the cache rows prefix .. prefix + m each row sees, itself included.
    # Rows ascend along a path: an ancestor has a lower row than its descendants. None: a causal chain, m == n.
    mask: NDArray[np.bool_] | None = None
    wanted: int | None = None  # logits wanted for the last `wanted` rows; None: all; 0: none (a prefill chunk)

    @property
    def span(self) -> int:
        """Number m of cache rows behind the prefix that this segment reads or writes."""
        return len(self.tokens) if self.mask is None else self.mask.shape[1]

    @property
    def seen(self) -> NDArray[np.bool_]:
        """Which of the cache rows behind the prefix each new row sees: [n, m]."""
        return np.tri(len(self.tokens), dtype=np.bool_) if self.mask is None else self.mask

    @property
    def outputs(self) -> int:
        """Number of rows for which the pass gives logits."""
        return len(self.tokens) if self.wanted is None else self.wanted

    def check(self, *, slots: int, rows: int, vocabulary: int, positions: int) -> None:
        """Raise ValueError when the segment does not fit an engine of that shape."""
        count = len(self.tokens)
        checks = (
            (count >= 1, "has no rows"),
            (0 <= self.slot < slots, f"slot {self.slot} is not one of the engine's {slots}"),
            (self.positions.shape == (count,), f"has {count} tokens and positions {self.positions.shape}"),
            (
                self.mask is None or (self.mask.shape[0] == count and self.mask.shape[1] >= count),
                f"has {count} tokens and a mask of another height, or one narrower than that",
            ),
            (
                self.prefix >= 0 and self.prefix + self.span <= rows,
                f"prefix {self.prefix} and {self.span} rows behind it do not fit the slot's {rows} rows",
            ),
            (0 <= self.outputs <= count, f"wants {self.wanted} rows of logits of {count}"),
        )
        for holds, problem in checks:
            if not holds:
                raise ValueError(f"segment of slot {self.slot}: {problem}")
        if self.tokens.min() < 0 or self.tokens.max() >= vocabulary:
            raise ValueError(f"segment of slot {self.slot}: a token outside the vocabulary of {vocabulary}")
        if self.positions.min() < 0 or self.positions.max() >= positions:
            raise ValueError(f"segment of slot {self.slot}: a position outside 0 .. {positions - 1}")
        if self.mask is not None and not self.mask.diagonal(self.span - count).all():
            raise ValueError(f"segment of slot {self.slot}: a row that does not see itself")
