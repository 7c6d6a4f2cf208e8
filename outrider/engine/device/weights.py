"""A model's weights as plain tensors on a device, a layer's together, so that one function serves all layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.checkpoint import ModelConfig
from outrider.engine.sharding import Shard
from outrider.engine.weights import LayerWeights, Reader, Source


class ModelWeights(NamedTuple):
    """All of a model, or a rank's part of it. Norms are float32."""

    embedding: Tensor  # [vocabulary, width / ranks]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [width]
    head: Tensor  # [vocabulary / ranks, width]; the embedding itself where it may be
    parameters: int  # of the layers that were read, on all ranks

    @property
    def bytes_of_a_pass(self) -> int:
        """Bytes that every pass reads: of the embedding a few rows alone."""
        return sum(part.nbytes for layer in self.layers for part in layer if part is not None) + self.head.nbytes


def load_weights(
    source: Source, config: ModelConfig, shard: Shard, kept: Iterable[int], device: torch.device, dtype: torch.dtype
) -> ModelWeights:
    """Reads the `kept` layers one after another, and of each weight only what `shard` holds.

    `config`: the whole model's. Raises CheckpointError.
    """
    reader = Reader(source, config, shard, device=device, dtype=dtype)
    embedding = reader.embedding()
    layers = tuple(reader.layer(index) for index in kept)
    head = embedding if config.tied and shard.of == 1 else reader.head()
    return ModelWeights(embedding, layers, reader.norm(), head, reader.parameters)
