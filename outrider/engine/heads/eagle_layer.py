"""Passes of EAGLE's layer over rows of many slots, and the KV of these rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.checkpoints.rope import Rope
from outrider.engine.heads.config import HeadsConfig
from outrider.engine.heads.eagle import Attend, Eagle, Eagle3
from outrider.engine.heads.embeddings import TargetEmbeddings
from outrider.engine.heads.last_row import mask_padding
from outrider.engine.heads.speculator import FloatRows
from outrider.engine.interface.batch import Segment
from outrider.engine.torch_layers.attention import FastAttention, attend_runs
from outrider.engine.torch_layers.kv_cache import KVCache
from outrider.engine.torch_layers.packing import Packed, pack, rows_of
from outrider.engine.torch_layers.weights import complex_rotations


class EagleLayer:
    """An EAGLE network between the embedding and the unembedding of the target. One call at a time."""

    def __init__(
        self, network: Eagle | Eagle3, shape: HeadsConfig, embeddings: TargetEmbeddings, *, slots: int, rows: int
    ) -> None:
        """`rows`: KV rows of a slot."""
        self._network = network
        self._shape = shape
        self._embeddings = embeddings
        self._cache = KVCache(1, slots, shape.kv_heads, rows, shape.head_dim)
        self._attention = FastAttention(shape.heads, shape.kv_heads)
        self._rotations = complex_rotations(Rope(shape.theta, None), rows, shape.head_dim)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV when all rows have been written."""
        return self._cache.bytes

    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy KV rows [0, rows) of one slot to another."""
        self._cache.copy(source, target, rows)

    def run(self, segments: Sequence[Segment], states: Tensor) -> Tensor:
        """Run one pass and return the states of the wanted rows: [wanted, width].

        `states`: for each row of the segments, in order, the state of the row before it: [rows, width].
        """
        packed = pack(segments)
        before = states.new_zeros(len(packed.tokens), states.shape[1])
        before[rows_of(packed, segments)] = states
        rotations = self._rotations[packed.positions]
        computed = self._network(self._embeddings.embed(packed.tokens), before, rotations, self._attend(packed))
        chosen: Tensor = computed if packed.outputs is None else computed[packed.outputs]
        return chosen[: packed.outputs_used]

    def logits(self, states: Tensor) -> FloatRows:
        """Return the logits of the tokens that follow rows of these states: [rows, vocabulary]."""
        return mask_padding(self._network.logits(states, self._embeddings.unembed), self._embeddings)

    def _attend(self, packed: Packed) -> Attend:
        calls = [self._attention.prepare(run) for run in packed.runs]
        views = [self._cache.views(run) for run in packed.runs]
        write = self._cache.writer(packed.written)
        shape = self._shape
        group = shape.heads // shape.kv_heads

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            write(0, torch.stack([key, value], 1)[: packed.used])
            folded = query.view(-1, shape.kv_heads, group, shape.head_dim).transpose(1, 2).flatten(1)  # group first
            found = attend_runs(folded, packed, calls, [(keys[0], values[0]) for keys, values in views])
            return found.view(-1, group, shape.kv_heads, shape.head_dim).transpose(1, 2).flatten(1)

        return attend
