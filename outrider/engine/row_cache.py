"""The keys and values of all sessions, where a model of `transformers` looks for its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from outrider.engine.cache import lazy_zeros
from outrider.engine.tree_attention import present


class RowCache(Cache):
    """[slot, kv_head, row, dim] for each layer's keys and values; their shapes are those of the first that come.

    For the library it is a cache that has not been used: how long a session is differs, so that the model must take
    positions and masks from us. Whatever else a layer wants to keep has no place here, and raises.
    """

    def __init__(self, slots: int, rows: int) -> None:
        super().__init__(layers=[])
        self.positions = torch.zeros(slots, rows, dtype=torch.int64)  # of each row's token, in every slot
        self._slots, self._rows = slots, rows
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # by layer: keys, values

    @property
    def bytes(self) -> int:
        """Taken when every row has been written."""
        return sum(part.nbytes for part in self._parts())

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes a layer's new rows of the present call; gives what the call reads."""
        if layer_idx not in self._kept:
            self._kept[layer_idx] = self._room(key_states), self._room(value_states)
        keys, values = self._kept[layer_idx]
        batch = present.get()
        batch.write(keys, key_states)
        batch.write(values, value_states)
        return batch.read(keys), batch.read(values)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys that the present call reads, from the first on."""
        return present.get().keys, 0

    def move(self, slot: int, source: Tensor, destination: Tensor) -> None:
        """Moves rows of one slot, in all layers. Every row is read before one is written."""
        for part in self._parts():
            rows = part[slot]
            rows.index_copy_(1, destination, rows.index_select(1, source))
        self.positions[slot].index_copy_(0, destination, self.positions[slot].index_select(0, source))

    def copy(self, source: int, target: int, count: int) -> None:
        """Copies the first `count` rows of one slot to another, in all layers."""
        for part in self._parts():
            part[target, :, :count].copy_(part[source, :, :count])
        self.positions[target, :count].copy_(self.positions[source, :count])

    def _room(self, new: Tensor) -> Tensor:
        """For rows of that shape and type."""
        return lazy_zeros(self._slots, new.shape[1], self._rows, new.shape[3], dtype=new.dtype)

    def _parts(self) -> list[Tensor]:
        return [part for layer in self._kept.values() for part in layer]
