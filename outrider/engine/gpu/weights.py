"""A model's weights as plain tensors on a device, grouped by layer, so that one function computes all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from outrider.engine.checkpoints.checkpoint import ModelConfig
from outrider.engine.gpu.linears.float8 import Float8Weight, quantized
from outrider.engine.gpu.linears.int4 import GroupedInt4Weight, quantized4
from outrider.engine.tensor_parallel.sharding import Shard, tensor_shapes
from outrider.engine.torch_layers.linear import Linear, float_linear
from outrider.engine.torch_layers.weights import WeightReader, WeightSource

DeviceDtype = Literal["float32", "bfloat16", "float8", "int4"]  # of the layers' linears
Weight = Tensor | Float8Weight | GroupedInt4Weight | Linear


class DeviceLayer(NamedTuple):
    """The weights of one layer; those of linears may have 8 or 4 bits, or are packed for a CPU."""

    attention_norm: Tensor  # [width]
    qkv: Weight  # [(heads + 2 * kv_heads) * head_dim, width]
    qkv_bias: Tensor | None
    head_norms: tuple[Tensor, Tensor] | None  # of queries and keys, [head_dim] each
    output: Weight  # [width, heads * head_dim]
    output_bias: Tensor | None  # on rank 0 alone, as `down_bias`
    ffn_norm: Tensor
    gate_up: Weight  # [2 * ffn, width]
    gate_up_bias: Tensor | None
    down: Weight  # [width, ffn]
    down_bias: Tensor | None

    @classmethod
    def of(cls, layer: Mapping[str, Tensor], dtype: DeviceDtype) -> DeviceLayer:
        """Make it of weights in bfloat16 or float32, see `Shard.layer`."""

        def stored(weight: Tensor) -> Weight:
            if dtype == "int4":
                return quantized4(weight)
            if dtype == "float8":
                return quantized(weight)
            return float_linear(weight, None, weight.dtype) if weight.device.type == "cpu" else weight

        def joined(*names: str) -> tuple[Weight, Tensor | None]:
            biases = [layer[f"{name}_bias"] for name in names if f"{name}_bias" in layer]
            return stored(torch.cat([layer[name] for name in names])), torch.cat(biases) if biases else None

        return cls(
            layer["attention_norm"],
            *joined("query", "key", "value"),
            (layer["query_norm"], layer["key_norm"]) if "query_norm" in layer else None,
            stored(layer["output"]),
            layer.get("output_bias"),
            layer["ffn_norm"],
            *joined("gate", "up"),
            stored(layer["down"]),
            layer.get("down_bias"),
        )

    @property
    def nbytes(self) -> int:
        """Bytes that a pass reads; those of the norms of heads are too few to count."""
        return sum(part.nbytes for part in self if isinstance(part, Weight))


class ModelWeights(NamedTuple):
    """The weights of a model, or a rank's part of them. Norms are float32."""

    embedding: Tensor  # [vocabulary, width / ranks]
    layers: tuple[DeviceLayer, ...]
    norm: Tensor  # [width]
    head: Tensor  # [rows / ranks, width], float32 on a CPU; the same tensor as the embedding where possible
    parameters: int  # of the layers that were read, on all ranks
    dtype: DeviceDtype

    @property
    def bytes_of_a_pass(self) -> int:
        """Bytes of weights that a pass reads; the few rows of the embedding do not count."""
        return sum(layer.nbytes for layer in self.layers) + self.head.nbytes


def load_weights(
    source: WeightSource,
    config: ModelConfig,
    shard: Shard,
    kept: Sequence[int],
    device: torch.device,
    dtype: DeviceDtype,
) -> ModelWeights:
    """Read the `kept` layers one after another, and of each weight only the part that `shard` holds.

    `config`: that of the complete model. Raises CheckpointError.
    """
    kind = torch.float32 if dtype == "float32" else torch.bfloat16
    reader = WeightReader(source, config, shard, device=device, dtype=kind)
    embedding = reader.embedding()
    layers = tuple(DeviceLayer.of(reader.layer(index), dtype) for index in kept)
    head = embedding if config.tied and shard.of == 1 else reader.head()
    head = head.float() if device.type == "cpu" else head
    parameters = sum(map(prod, tensor_shapes(config, kept).values()))
    return ModelWeights(embedding, layers, reader.norm(), head, parameters, dtype)
