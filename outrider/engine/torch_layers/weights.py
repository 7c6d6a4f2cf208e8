"""Reads a model's weights, or a rank's part of them, as tensors."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.checkpoints.checkpoint import ModelConfig
from outrider.engine.checkpoints.rope import Rope
from outrider.engine.checkpoints.stored_tensors import ALL
from outrider.engine.tensor_parallel.sharding import Shard, WeightPart


class WeightSource(Protocol):
    """A source of weights, as `outrider.engine.checkpoints.checkpoint.Weights` is one."""

    def take(self, name: str, *shape: int, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """Return a tensor of that shape, or a part of it."""


class WeightReader:
    """Reads the part of a model that `shard` holds. All methods may raise CheckpointError.

    `config`: that of the complete model. Tensors are copied to `device` in `dtype`, norms in float32; without a device
    they are as stored.
    """

    def __init__(
        self,
        source: WeightSource,
        config: ModelConfig,
        shard: Shard,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._source = source
        self._config = config
        self._shard = shard
        self._device = device
        self._dtype = dtype
        self._ends = shard.ends(config)

    def embedding(self) -> Tensor:
        """Return the embedding: [vocabulary, width / ranks]."""
        return self._take(self._ends["embedding"])

    def layer(self, index: int) -> dict[str, Tensor]:
        """Return the weights of a layer of the checkpoint; see `Shard.layer`. Linears are [outputs, inputs]."""
        parts = self._shard.layer(self._config, index)
        return {what: self._take(part, is_norm=what.endswith("norm")) for what, part in parts.items()}

    def norm(self) -> Tensor:
        """Return the last norm: [width]."""
        return self._take(self._ends["norm"], is_norm=True)

    def head(self) -> Tensor:
        """Return the head: [rows / ranks, width]. All ranks have equally many rows, the last one with zeros."""
        head = self._take(self._ends["head"])
        missing = -(-self._config.head_rows // self._shard.of) - len(head)
        return torch.cat([head, head.new_zeros(missing, head.shape[1])]) if missing else head

    def _take(self, it: WeightPart, *, is_norm: bool = False) -> Tensor:
        taken = self._source.take(it.name, *it.shape, rows=it.rows, columns=it.columns)
        kind = torch.float32 if is_norm else self._dtype
        return taken if self._device is None else taken.to(self._device, kind, copy=True)


def complex_rotations(rope: Rope, positions: int, head_dim: int) -> Tensor:
    """Return the rotation of each RoPE pair at each position as a complex number: [positions, head_dim / 2]."""
    return torch.complex(*map(torch.from_numpy, rope.table(positions, head_dim)))
