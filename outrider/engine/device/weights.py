"""A model's weights as plain tensors on a device, grouped by layer, so that one function computes all layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.checkpoints.checkpoint import ModelConfig
from outrider.engine.eager.weights import LayerWeights, WeightReader, WeightSource
from outrider.engine.ranks.sharding import Shard


class ModelWeights(NamedTuple):
    """The weights of a model, or a rank's part of them. Norms are float32."""

    embedding: Tensor  # [vocabulary, width / ranks]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [width]
    head: Tensor  # [vocabulary / ranks, width]; the same tensor as the embedding where possible
    parameters: int  # of the layers that were read, on all ranks

    @property
    def bytes_of_a_pass(self) -> int:
        """Bytes of weights that a pass reads; the few rows of the embedding do not count."""
        return sum(part.nbytes for layer in self.layers for part in layer if part is not None) + self.head.nbytes


def load_weights(
    source: WeightSource,
    config: ModelConfig,
    shard: Shard,
    kept: Iterable[int],
    device: torch.device,
    dtype: torch.dtype,
) -> ModelWeights:
    """Read the `kept` layers one after another, and of each weight only the part that `shard` holds.

    `config`: that of the complete model. Raises CheckpointError.
    """
    reader = WeightReader(source, config, shard, group_first=False, device=device, dtype=dtype)
    embedding = reader.embedding()
    layers = tuple(reader.layer(index) for index in kept)
    head = embedding if config.tied and shard.of == 1 else reader.head()
    return ModelWeights(embedding, layers, reader.norm(), head, reader.parameters)
