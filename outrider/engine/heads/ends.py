"""The two ends of the target that heads share with it: its embedding and its unembedding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from outrider.engine.checkpoint import Weights, read_config
from outrider.engine.linear import float_linear
from outrider.engine.sharding import Shard
from outrider.engine.weights import Reader

Unembed = Callable[[Tensor], Tensor]  # [..., width] to logits [..., vocabulary]


@dataclass(frozen=True, slots=True)
class Ends:
    """Both."""

    embed: Callable[[Tensor], Tensor]  # ids [...] to [..., width] float32
    unembed: Unembed  # gives float32
    vocabulary: int  # ids of the target
    sayable: int  # ids from there on are padding

    def below(self, vocabulary: int) -> Ends:
        """For heads whose own unembedding has so many ids: what it lacks, they cannot say."""
        return replace(self, sayable=min(self.sayable, vocabulary))


def read_ends(target: Path, dtype: torch.dtype, *, training: bool = False) -> Ends:
    """Of a checkpoint of the Llama family; the unembedding in `dtype`, `training`: such that gradients go through it.

    Copies of their own: an engine's may be a rank's part, or of another type. Raises CheckpointError.
    """
    config = read_config(target)
    reader = Reader(Weights(target), config, Shard())
    table = reader.embedding().clone()  # what was taken may be a view of the file
    weight = reader.head().to(dtype, copy=True)
    head = partial(linear, weight=weight) if training else float_linear(weight, None, dtype)

    def unembed(states: Tensor) -> Tensor:
        return head(states.flatten(0, -2).to(dtype)).float().view(*states.shape[:-1], -1)

    return Ends(lambda ids: embedding(ids, table).float(), unembed, config.vocabulary, config.sayable)
