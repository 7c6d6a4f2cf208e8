"""The input of a forward pass: the new rows of each session, which one pass computes together."""

from __future__ import annotations

from collections.abc import Sequence
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
    adapter: object | None = None  # adapter of its rows, from the engine's `load_adapter`; None: the model as it is

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

    def check(self, *, slots: int, rows: int) -> None:
        """Raise ValueError when the segment does not fit an engine of that shape."""
        count, mask = len(self.tokens), self.mask
        if count < 1:
            problem = "has no rows"
        elif not 0 <= self.slot < slots:
            problem = f"slot {self.slot} is not one of the engine's {slots}"
        elif self.positions.shape != (count,):
            problem = f"has {count} tokens and positions {self.positions.shape}"
        elif mask is not None and (mask.shape[0] != count or mask.shape[1] < count):
            problem = f"has {count} tokens and a mask of another height, or one narrower than that"
        elif self.prefix < 0 or self.prefix + self.span > rows:
            problem = f"prefix {self.prefix} and {self.span} rows behind it do not fit the slot's {rows} rows"
        elif not 0 <= self.outputs <= count:
            problem = f"wants {self.wanted} rows of logits of {count}"
        elif mask is not None and not mask.diagonal(mask.shape[1] - count).all():
            problem = "a row that does not see itself"
        else:
            return
        raise ValueError(f"segment of slot {self.slot}: {problem}")


def check_numbers(segments: Sequence[Segment], vocabulary: int, positions: int) -> None:
    """Raise ValueError for a token or a position out of range. The segments of a pass are looked at together."""
    for arrays, limit, problem in (
        ([it.tokens for it in segments], vocabulary, f"a token outside the vocabulary of {vocabulary}"),
        ([it.positions for it in segments], positions, f"a position outside 0 .. {positions - 1}"),
    ):
        numbers = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        if numbers.astype(np.int64, copy=False).view(np.uint64).max() >= limit:  # negatives are huge as uint64
            bad = next(it for it, own in zip(segments, arrays, strict=True) if own.min() < 0 or own.max() >= limit)
            raise ValueError(f"segment of slot {bad.slot}: {problem}")
