"""The keys and values of all sessions, in one tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.engine.packing import Run


class KVCache:
    """`[layer, 2, slot, kv_head, row, dim]` float32; memory is taken when a row is first written."""

    def __init__(self, layers: int, slots: int, kv_heads: int, rows: int, head_dim: int) -> None:
        self._data = torch.zeros(layers, 2, slots, kv_heads, rows, head_dim)
        self._layers = self._data.unbind(0)

    def views(self, run: Run) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Keys and values that a run reads, a tensor [slots, kv_head, keys, dim] for each layer. No copies."""
        part = self._data[:, :, run.slot : run.slot + run.slots, :, : run.keys]
        return part[:, 0].unbind(0), part[:, 1].unbind(0)

    def targets(self, written: tuple[int, int, int]) -> tuple[Tensor, ...]:
        """Where one session's new rows go, a tensor [rows, 2, kv_head, dim] for each layer."""
        slot, start, stop = written
        return self._data[:, :, slot, :, start:stop].permute(0, 3, 1, 2, 4).unbind(0)

    def scatter(self, layer: int, slots: Tensor, rows: Tensor, new: Tensor) -> None:
        """Writes `new` [n, 2, kv_head, dim] to one slot and row for each."""
        self._layers[layer][:, slots, :, rows] = new

    def move(self, slot: int, source: Tensor, destination: Tensor) -> None:
        """Moves rows of one slot, in all layers at once. Every row is read before one is written."""
        rows = self._data[:, :, slot]
        rows.index_copy_(3, destination, rows.index_select(3, source))
