"""The KV cache: keys and values of all sessions, in one tensor."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable

import torch
from torch import Tensor

from outrider.engine.torch_layers.packing import AttentionRun, CacheCells, KeyRange

ALL = slice(None)


def lazy_zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return zeros in pages that the system maps at their first use; torch.zeros would write all of them.

    The pages are small: otherwise the first row of a head would take two megabytes in each layer, and the time to clear
    them.
    """
    buffer = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # not on all systems
        buffer.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


class KVCache:
    """Keys and values, `[layer, 2, slot, kv_head, row, dim]` float32; a row takes memory when it is first written."""

    def __init__(self, layers: int, slots: int, kv_heads: int, rows: int, head_dim: int) -> None:
        self._data = lazy_zeros(layers, 2, slots, kv_heads, rows, head_dim)
        self._layers = self._data.unbind(0)

    @property
    def bytes(self) -> int:
        """Bytes of the cache when all rows have been written."""
        return self._data.nbytes

    def views(self, run: AttentionRun) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return views of the keys and values that a run reads: for each layer [slots, kv_head, keys, dim]."""
        part = self._data[:, :, run.slot : run.slot + run.slots, :, : run.keys]
        return part[:, 0].unbind(0), part[:, 1].unbind(0)

    def writer(self, written: KeyRange | CacheCells) -> Callable[[int, Tensor], object]:
        """Return a function that writes a layer's new keys and values, [n, 2, kv_head, dim], to the rows `written`."""
        if isinstance(written, KeyRange):
            part = self._data[:, :, written.slot, :, written.start : written.stop]
            targets = part.permute(0, 3, 1, 2, 4).unbind(0)
            return lambda layer, new: targets[layer].copy_(new)
        return lambda layer, new: self._layers[layer].__setitem__((ALL, written.slots, ALL, written.rows), new)

    def move(self, slot: int, source: Tensor, destination: Tensor) -> None:
        """Move rows of one slot, in all layers at once. All rows are read before one is written."""
        rows = self._data[:, :, slot]
        rows.index_copy_(3, destination, rows.index_select(3, source))

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` rows of one slot to another, in all layers at once."""
        self._data[:, :, target, :, :count].copy_(self._data[:, :, source, :, :count])
