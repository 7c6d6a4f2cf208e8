"""The weights of a Llama-family model, arranged for few operations a layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.checkpoints.checkpoint import ModelConfig
from outrider.engine.interface.engine import Dtype
from outrider.engine.tensor_parallel.sharding import Shard
from outrider.engine.torch_layers.linear import Linear, float_linear
from outrider.engine.torch_layers.quantized import int4_linear, int8_linear
from outrider.engine.torch_layers.weights import LayerWeights, WeightReader, WeightSource

# Type of the head, by that of the layers. Quantized models have it in int8: in float32 it would be half of a small
# model.
HEADS: dict[Dtype, Dtype] = {"float32": "float32", "bfloat16": "float32", "int8": "int8", "int4": "int8"}


class RMSNorm:
    """Computes `x / sqrt(mean(x**2) + eps) * weight` over the last dimension, in float32 (arXiv 1910.07467).

    Written as `x / hypot(|x|, sqrt(n * eps)) * (weight * sqrt(n))`: four operations, where torch runs eight.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[0]
        self._weight = weight.float() * size**0.5
        self._floor = torch.tensor((size * eps) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, 2, -1, True)
        return x.div(torch.hypot(norm, self._floor)).mul_(self._weight)


@dataclass(frozen=True, slots=True)
class EagerLayer:
    """One transformer layer.

    `qkv` returns [rows, (heads + 2 * kv_heads) * head_dim]. Query heads are ordered group first, so that the queries
    which share a KV head fold into the rows of one attention call without a copy; `output` takes the same order.
    The dimensions of queries and keys are interleaved for RoPE.
    """

    attention_norm: RMSNorm
    qkv: Linear
    head_norms: tuple[RMSNorm, RMSNorm] | None  # of queries and keys
    output: Linear
    ffn_norm: RMSNorm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class EagerModel:
    """The weights of a model, or a rank's part of them, with the shapes of the rank's part of the configuration."""

    embedding: Tensor  # [vocabulary, width / ranks], as the checkpoint stores it
    layers: tuple[EagerLayer, ...]
    norm: RMSNorm
    head: Linear  # [vocabulary / ranks, width]
    parameters: int  # of the layers that were read, on all ranks

    @property
    def bytes_of_a_pass(self) -> int:
        """Bytes of weights that a pass reads: the linears of all layers, and the head."""
        linears = [linear for it in self.layers for linear in (it.qkv, it.output, it.gate_up, it.down)]
        return sum(linear.bytes for linear in (*linears, self.head))


def make_linear(weight: Tensor, bias: Tensor | None, dtype: Dtype) -> Linear:
    """Return a linear layer with a weight of that type. Raises ConfigError when there is no kernel for its shape."""
    match dtype:
        case "int8":
            return int8_linear(weight, bias)
        case "int4":
            return int4_linear(weight, bias)
        case _:
            return float_linear(weight, bias, torch.float32 if dtype == "float32" else torch.bfloat16)


def load_model(
    source: WeightSource, config: ModelConfig, shard: Shard, dtype: Dtype, kept: Iterable[int]
) -> EagerModel:
    """Read, quantize and pack the `kept` layers of a checkpoint, embedding, norm and head, one after another.

    Read of each weight only the part that `shard` holds. `config`: that of the complete model.

    Raises CheckpointError; ConfigError where a weight's shape has no kernel of that type.
    """
    reader = WeightReader(source, config, shard, interleaved=True)
    embedding = reader.embedding().clone()  # the tensor may be a view of the file
    layers = tuple(_packed(reader.layer(index), config.eps, dtype) for index in kept)
    norm = RMSNorm(reader.norm(), config.eps)
    head = make_linear(reader.head(), None, HEADS[dtype])
    return EagerModel(embedding, layers, norm, head, reader.parameters)


def _packed(it: LayerWeights, eps: float, dtype: Dtype) -> EagerLayer:
    """Return a layer with packed linears."""
    head_norms = None
    if it.query_norm is not None and it.key_norm is not None:
        head_norms = RMSNorm(it.query_norm, eps), RMSNorm(it.key_norm, eps)
    return EagerLayer(
        attention_norm=RMSNorm(it.attention_norm, eps),
        qkv=make_linear(it.qkv, it.qkv_bias, dtype),
        head_norms=head_norms,
        output=make_linear(it.output, it.output_bias, dtype),
        ffn_norm=RMSNorm(it.ffn_norm, eps),
        gate_up=make_linear(it.gate_up, it.gate_up_bias, dtype),
        down=make_linear(it.down, it.down_bias, dtype),
    )
