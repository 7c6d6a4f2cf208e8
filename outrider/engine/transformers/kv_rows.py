"""The keys and values of all sessions, as a cache object of `transformers`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from outrider.engine.torch_layers.kv_cache import lazy_zeros
from outrider.engine.transformers.tree_attention import current


class RowCache(Cache):
    """The keys and values of each layer, [slot, kv_head, row, dim]; the first ones that a model writes give the sizes.

    To transformers this is an empty cache: sessions differ in length, so the model must use the positions and masks of
    this package. A layer that keeps any other state raises.
    """

    def __init__(self, slots: int, rows: int) -> None:
        super().__init__(layers=[])
        self.positions = torch.zeros(slots, rows, dtype=torch.int64)  # of each row's token, by slot
        self._slots, self._rows = slots, rows
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # by layer: keys, values

    @property
    def bytes(self) -> int:
        """Bytes of the cache when all rows have been written."""
        return sum(part.nbytes for part in self._parts())

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new rows of the current call, and return the rows that the call reads."""
        if layer_idx not in self._kept:
            self._kept[layer_idx] = self._allocate(key_states), self._allocate(value_states)
        keys, values = self._kept[layer_idx]
        batch = current.get()
        batch.write(keys, key_states)
        batch.write(values, value_states)
        return batch.read(keys), batch.read(values)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys that the current call reads, and the first of them."""
        return current.get().keys, 0

    def move(self, slot: int, source: Tensor, destination: Tensor) -> None:
        """Move rows of one slot, in all layers. All rows are read before one is written."""
        for part in self._parts():
            rows = part[slot]
            rows.index_copy_(1, destination, rows.index_select(1, source))
        self.positions[slot].index_copy_(0, destination, self.positions[slot].index_select(0, source))

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` rows of one slot to another, in all layers."""
        for part in self._parts():
            part[target, :, :count].copy_(part[source, :, :count])
        self.positions[target, :count].copy_(self.positions[source, :count])

    def _allocate(self, new: Tensor) -> Tensor:
        """Return memory for rows of that shape and type in all slots."""
        return lazy_zeros(self._slots, new.shape[1], self._rows, new.shape[3], dtype=new.dtype)

    def _parts(self) -> list[Tensor]:
        return [part for layer in self._kept.values() for part in layer]
