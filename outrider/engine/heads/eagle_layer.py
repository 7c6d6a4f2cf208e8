"""Passes of EAGLE's layer over rows of many slots, and the KV of these rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.engine.checkpoints.rope import Rope
from outrider.engine.heads.config import HeadsConfig
from outrider.engine.heads.eagle import Eagle, Eagle3
from outrider.engine.heads.embeddings import TargetEmbeddings
from outrider.engine.heads.last_row import mask_padding
from outrider.engine.heads.speculator import FloatRows
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.masks import visible_keys
from outrider.engine.torch_layers.attention import attend_text
from outrider.engine.torch_layers.kv_cache import lazy_zeros
from outrider.engine.torch_layers.weights import complex_rotations

EXACT_ROWS = 32  # passes of up to this many rows run at their own size
ROW_TILE = 8  # larger passes run at multiples of this


class EagleLayer:
    """An EAGLE network between the embedding and the unembedding of the target. One call at a time."""

    def __init__(
        self, network: Eagle | Eagle3, shape: HeadsConfig, embeddings: TargetEmbeddings, *, slots: int, rows: int
    ) -> None:
        """`rows`: KV rows of a slot."""
        self._network = network
        self._shape = shape
        self._embeddings = embeddings
        self._cache = lazy_zeros(2, slots, shape.kv_heads, rows, shape.head_dim)  # keys and values
        self._rotations = complex_rotations(Rope(shape.theta, None), rows, shape.head_dim)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV when all rows have been written."""
        return self._cache.nbytes

    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy KV rows [0, rows) of one slot to another."""
        self._cache[:, target, :, :rows] = self._cache[:, source, :, :rows]

    def run(self, segments: Sequence[Segment], states: Tensor) -> Tensor:
        """Run one pass and return the states of the wanted rows: [wanted, width].

        `states`: for each row of the segments, in order, the state of the row before it: [rows, width].
        """
        padding = padded_size(len(states)) - len(states)
        tokens, positions = (
            torch.from_numpy(np.pad(np.concatenate(parts), (0, padding)))
            for parts in ([it.tokens for it in segments], [it.positions for it in segments])
        )
        embedded, before = self._embeddings.embed(tokens), pad(states, (0, 0, 0, padding))
        computed = self._network(embedded, before, self._rotations[positions], partial(self._attend, segments))
        ends = np.cumsum([len(it.tokens) for it in segments])
        wanted = [np.arange(end - it.outputs, end) for it, end in zip(segments, ends, strict=True)]
        chosen: Tensor = computed[torch.from_numpy(np.concatenate(wanted))]
        return chosen

    def logits(self, states: Tensor) -> FloatRows:
        """Return the logits of the tokens that follow rows of these states: [rows, vocabulary]."""
        return mask_padding(self._network.logits(states, self._embeddings.unembed), self._embeddings)

    def _attend(self, segments: Sequence[Segment], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write the KV of the segments' rows, and attend to the texts: see `Attend`. Rows of padding become zeros."""
        attended, first = torch.zeros_like(query), 0
        for it in segments:
            count, end = len(it.tokens), it.prefix + it.span
            rows, first = slice(first, first + count), first + count
            text = self._cache[:, it.slot, :, :end]
            for held, new in zip(text, (key, value), strict=True):
                held[:, end - count :] = new[rows].transpose(0, 1)
            seen = torch.from_numpy(visible_keys([it], [0], (1, count, end))[0])
            attended[rows] = attend_text(query[rows], text[0], text[1], None if seen.all() else seen)
        return attended.flatten(1)


def padded_size(rows: int) -> int:
    """Return how many rows a pass over `rows` rows computes. Never one: a single row is computed differently.

    Large passes have few sizes, because oneDNN compiles a kernel for each new one.
    """
    return max(2, rows if rows <= EXACT_ROWS else -(-rows // ROW_TILE) * ROW_TILE)
