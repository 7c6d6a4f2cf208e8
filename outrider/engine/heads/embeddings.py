"""The target's embedding and unembedding, which heads share with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from outrider.engine.checkpoints.checkpoint import Weights, read_config
from outrider.engine.tensor_parallel.sharding import Shard
from outrider.engine.torch_layers.linear import float_linear
from outrider.engine.torch_layers.weights import WeightReader

Unembed = Callable[[Tensor], Tensor]  # [..., width] to logits [..., vocabulary]


@dataclass(frozen=True, slots=True)
class TargetEmbeddings:
    """The embedding and the unembedding of a target."""

    embed: Callable[[Tensor], Tensor]  # ids [...] to [..., width] float32
    unembed: Unembed  # returns float32
    vocabulary: int  # ids of the target
    unpadded_vocabulary: int  # ids from this one on are padding

    def below(self, vocabulary: int) -> TargetEmbeddings:
        """Return these for heads with an unembedding of `vocabulary` ids: such heads cannot draft ids beyond them."""
        return replace(self, unpadded_vocabulary=min(self.unpadded_vocabulary, vocabulary))


def read_target_embeddings(target: Path, dtype: torch.dtype, *, training: bool = False) -> TargetEmbeddings:
    """Return copies of both embeddings of a checkpoint of the Llama family, the unembedding in `dtype`.

    `training`: gradients pass through the unembedding. Copy, because an engine may hold only a rank's part of them,
    or another type. Raises CheckpointError.
    """
    config = read_config(target)
    reader = WeightReader(Weights(target), config, Shard())
    table, weight = reader.embedding(), reader.head().to(dtype)
    head = partial(linear, weight=weight) if training else float_linear(weight, None, dtype)

    def unembed(states: Tensor) -> Tensor:
        return head(states.flatten(0, -2).to(dtype)).float().view(*states.shape[:-1], -1)

    return TargetEmbeddings(
        lambda ids: embedding(ids, table).float(), unembed, config.vocabulary, config.unpadded_vocabulary
    )
