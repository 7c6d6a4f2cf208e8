"""Training samples for drafters: a piece of a session's text with the target's probabilities of each generated token.

Packed, little-endian: format (uint8), k (uint8), first (uint16), n (uint16), greedy (uint8), then the n tokens
(uint32), and for each of the n - first tokens that the target chose the ids of the k most likely tokens (uint32) and
their log-probabilities (float16), raw and at temperature 1. The probability missing to 1 belongs to all other tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TOP = 16  # most likely tokens that are kept for each position
MAX_CHOSEN = 256  # tokens in one sample that the target chose
MAX_CONTEXT = 256  # context tokens before them, for a drafter to read

_HEAD = struct.Struct("<BBHHB")
_FORMAT = 2


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class TrainingSample:
    """A text with the target's probabilities. Row i of `ids` and `logprobs` belongs to the position of
    tokens[first + i]."""

    tokens: NDArray[np.int64]  # [n]
    first: int  # index of the first token that the target chose; at least one token is before it
    ids: NDArray[np.int64]  # [n - first, k] most likely first
    logprobs: NDArray[np.float32]  # [n - first, k]
    greedy: bool = False  # whether the target decoded greedily, at temperature 0

    @property
    def chosen(self) -> int:
        """The number of tokens that the target chose, from which a drafter can learn."""
        return len(self.tokens) - self.first

    def pack(self) -> bytes:
        """Return the sample as bytes."""
        head = _HEAD.pack(_FORMAT, self.ids.shape[1], self.first, len(self.tokens), self.greedy)
        parts = (self.tokens.astype("<u4"), self.ids.astype("<u4"), self.logprobs.astype("<f2"))
        return head + b"".join(part.tobytes() for part in parts)

    @classmethod
    def unpack(cls, blob: bytes) -> TrainingSample:
        """Return the sample that `pack` encoded. Raises ValueError for bytes that are no sample."""
        if len(blob) < _HEAD.size:
            raise ValueError(f"{len(blob)} bytes are no training sample")
        kind, k, first, count, greedy = _HEAD.unpack_from(blob)
        rows = count - first
        if (
            kind != _FORMAT
            or greedy > 1
            or not k
            or not 1 <= first < count
            or len(blob) != _HEAD.size + 4 * count + 6 * rows * k
        ):
            raise ValueError(f"{len(blob)} bytes of format {kind} are no training sample of a known format")
        tokens = np.frombuffer(blob, "<u4", count, _HEAD.size)
        ids = np.frombuffer(blob, "<u4", rows * k, _HEAD.size + 4 * count)
        logprobs = np.frombuffer(blob, "<f2", rows * k, _HEAD.size + 4 * count + 4 * rows * k).astype(np.float32)
        if not (logprobs <= 0.01).all():  # neither NaN nor above the rounding of 1
            raise ValueError("log-probabilities must not be above 0")
        return cls(
            tokens.astype(np.int64),
            first,
            ids.astype(np.int64).reshape(rows, k),
            logprobs.reshape(rows, k),
            bool(greedy),
        )


def sample_of(
    tokens: Sequence[int], ids: NDArray[np.int64], logprobs: NDArray[np.float32], *, greedy: bool = False
) -> TrainingSample:
    """Return a sample of the end of a session's text.

    The target chose the last tokens; `ids` and `logprobs` are its most likely tokens at their positions: [chosen, k]
    each.
    """
    chosen = len(ids)
    kept = np.array(tokens[-(chosen + MAX_CONTEXT) :], np.int64)
    return TrainingSample(kept, len(kept) - chosen, ids[:, :TOP], logprobs[:, :TOP], greedy)
