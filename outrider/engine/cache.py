"""The keys and values of all sessions, in one tensor."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable

import torch
from torch import Tensor

from outrider.engine.packing import Cells, Run, Stretch

ALL = slice(None)


def lazy_zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros in pages that are mapped when they are touched; torch.zeros would write them all.

    Small pages: the first row of a head would otherwise take two megabytes, in each layer, and the time to clear them.
    """
    buffer = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # not everywhere
        buffer.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


class KVCache:
    """`[layer, 2, slot, kv_head, row, dim]` float32; memory is taken when a row is first written."""

    def __init__(self, layers: int, slots: int, kv_heads: int, rows: int, head_dim: int) -> None:
        self._data = lazy_zeros(layers, 2, slots, kv_heads, rows, head_dim)
        self._layers = self._data.unbind(0)

    @property
    def bytes(self) -> int:
        """Taken when every row has been written."""
        return self._data.nbytes

    def views(self, run: Run) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Keys and values that a run reads, a tensor [slots, kv_head, keys, dim] for each layer. No copies."""
        part = self._data[:, :, run.slot : run.slot + run.slots, :, : run.keys]
        return part[:, 0].unbind(0), part[:, 1].unbind(0)

    def writer(self, written: Stretch | Cells) -> Callable[[int, Tensor], object]:
        """A function that writes one layer's new keys and values, [n, 2, kv_head, dim], where `written` says."""
        if isinstance(written, Stretch):
            part = self._data[:, :, written.slot, :, written.start : written.stop]
            targets = part.permute(0, 3, 1, 2, 4).unbind(0)
            return lambda layer, new: targets[layer].copy_(new)
        return lambda layer, new: self._layers[layer].__setitem__((ALL, written.slots, ALL, written.rows), new)

    def move(self, slot: int, source: Tensor, destination: Tensor) -> None:
        """Moves rows of one slot, in all layers at once. Every row is read before one is written."""
        rows = self._data[:, :, slot]
        rows.index_copy_(3, destination, rows.index_select(3, source))

    def copy(self, source: int, target: int, count: int) -> None:
        """Copies the first `count` rows of one slot to another, in all layers at once."""
        self._data[:, :, target, :, :count].copy_(self._data[:, :, source, :, :count])
