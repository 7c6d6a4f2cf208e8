"""What drafters learn from: a piece of a session's text, and what the target thought of each token that it said there.

Packed, little-endian: format (uint8), k (uint8), first (uint16), n (uint16), greedy (uint8), then the n tokens
(uint32), and for each of the n - first that the target said the ids of its k most likely ones (uint32) and their
log-probabilities (float16), raw and at temperature 1. What is missing to 1 is the tail's.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TOP = 16  # of the target's most likely tokens that are kept for each position
MOST_SAID = 256  # tokens of the target's in one example
MOST_BEFORE = 256  # tokens before these, for a drafter to read

_HEAD = struct.Struct("<BBHHB")
_FORMAT = 2


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Example:
    """Row i is what the target thought of the place that tokens[first + i] stands at."""

    tokens: NDArray[np.int64]  # [n]
    first: int  # the first token that the target said; at least one token is before it
    ids: NDArray[np.int64]  # [n - first, k] most likely first
    logprobs: NDArray[np.float32]  # [n - first, k]
    greedy: bool = False  # whether the target said its likeliest tokens, at temperature 0

    @property
    def said(self) -> int:
        """Tokens that can be learned from."""
        return len(self.tokens) - self.first

    def pack(self) -> bytes:
        """As bytes."""
        head = _HEAD.pack(_FORMAT, self.ids.shape[1], self.first, len(self.tokens), self.greedy)
        parts = (self.tokens.astype("<u4"), self.ids.astype("<u4"), self.logprobs.astype("<f2"))
        return head + b"".join(part.tobytes() for part in parts)

    @classmethod
    def unpack(cls, blob: bytes) -> Example:
        """The same again. Raises ValueError for bytes that are no example."""
        if len(blob) < _HEAD.size:
            raise ValueError(f"{len(blob)} bytes are no example")
        kind, k, first, count, greedy = _HEAD.unpack_from(blob)
        rows = count - first
        if (
            kind != _FORMAT
            or greedy > 1
            or not k
            or not 1 <= first < count
            or len(blob) != _HEAD.size + 4 * count + 6 * rows * k
        ):
            raise ValueError(f"{len(blob)} bytes of format {kind} are no example that is known here")
        tokens = np.frombuffer(blob, "<u4", count, _HEAD.size)
        ids = np.frombuffer(blob, "<u4", rows * k, _HEAD.size + 4 * count)
        logprobs = np.frombuffer(blob, "<f2", rows * k, _HEAD.size + 4 * count + 4 * rows * k).astype(np.float32)
        if not (logprobs <= 0.01).all():  # neither NaN nor above the rounding of 1
            raise ValueError("log-probabilities are not above 0")
        return cls(
            tokens.astype(np.int64),
            first,
            ids.astype(np.int64).reshape(rows, k),
            logprobs.reshape(rows, k),
            bool(greedy),
        )


def example_of(
    tokens: Sequence[int], ids: NDArray[np.int64], logprobs: NDArray[np.float32], *, greedy: bool = False
) -> Example:
    """Of a session's tokens, the last of which the target said with these alternatives: [said, k] each."""
    said = len(ids)
    kept = np.array(tokens[-(said + MOST_BEFORE) :], np.int64)
    return Example(kept, len(kept) - said, ids[:, :TOP], logprobs[:, :TOP], greedy)
