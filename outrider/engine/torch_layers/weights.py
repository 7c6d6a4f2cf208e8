"""Reads a model's weights, joined to few linears for each layer, or a rank's part of them."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.engine.checkpoints.checkpoint import ModelConfig
from outrider.engine.checkpoints.rope import Rope
from outrider.engine.checkpoints.stored_tensors import ALL
from outrider.engine.tensor_parallel.sharding import Shard


class WeightSource(Protocol):
    """A source of weights, as `outrider.engine.checkpoints.checkpoint.Weights` is one."""

    def take(self, name: str, *shape: int, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """Return a tensor of that shape, or a part of it."""


class LayerWeights(NamedTuple):
    """The weights of one layer. Linears are [outputs, inputs]."""

    attention_norm: Tensor  # [width]
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, width]
    qkv_bias: Tensor | None
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None
    output: Tensor  # [width, heads * head_dim]
    output_bias: Tensor | None  # on rank 0 alone, as `down_bias`
    ffn_norm: Tensor
    gate_up: Tensor  # [2 * ffn, width]
    gate_up_bias: Tensor | None
    down: Tensor  # [width, ffn]
    down_bias: Tensor | None


_Linear = tuple[Tensor, Tensor | None]  # weight and bias


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
        self.parameters = 0  # read so far, on all ranks together

    def embedding(self) -> Tensor:
        """Return the embedding: [vocabulary, width / ranks]."""
        it = self._config
        return self._take("model.embed_tokens.weight", it.vocabulary, it.width, columns=self._shard.part(it.width))

    def layer(self, index: int) -> LayerWeights:
        """Return a layer of the checkpoint."""
        it, shard = self._config, self._shard
        prefix = f"model.layers.{index}"
        attention, ffn = f"{prefix}.self_attn", f"{prefix}.mlp"
        queries, keys = it.heads * it.head_dim, it.kv_heads * it.head_dim
        shard_heads, shard_units = shard.kv_heads(it), shard.part(it.ffn)
        shard_queries = shard.part(it.heads, it.head_dim)
        shard_keys = slice(shard_heads.start * it.head_dim, shard_heads.stop * it.head_dim)

        query = self._outputs(f"{attention}.q_proj", queries, it.qkv_bias, shard_queries)
        key = self._outputs(f"{attention}.k_proj", keys, it.qkv_bias, shard_keys)
        value = self._outputs(f"{attention}.v_proj", keys, it.qkv_bias, shard_keys)
        output, output_bias = self._inputs(f"{attention}.o_proj", queries, it.output_bias, shard_queries)
        gate = self._outputs(f"{ffn}.gate_proj", it.ffn, it.ffn_bias, shard_units)
        up = self._outputs(f"{ffn}.up_proj", it.ffn, it.ffn_bias, shard_units)
        return LayerWeights(
            self._norm(f"{prefix}.input_layernorm", it.width),
            *_joined(query, key, value),
            self._norm(f"{attention}.q_norm", it.head_dim) if it.head_norms else None,
            self._norm(f"{attention}.k_norm", it.head_dim) if it.head_norms else None,
            output,
            output_bias,
            self._norm(f"{prefix}.post_attention_layernorm", it.width),
            *_joined(gate, up),
            *self._inputs(f"{ffn}.down_proj", it.ffn, it.ffn_bias, shard_units),
        )

    def norm(self) -> Tensor:
        """Return the last norm: [width]."""
        return self._norm("model.norm", self._config.width)

    def head(self) -> Tensor:
        """Return the head: [vocabulary / ranks, width]. All ranks have equally many rows, the last one with zeros."""
        it, shard = self._config, self._shard
        name = "model.embed_tokens.weight" if it.tied else "lm_head.weight"
        head = self._take(name, it.vocabulary, it.width, rows=shard.tokens(it.vocabulary))
        if it.tied:
            self.parameters -= it.vocabulary * it.width
        if short := -(-it.vocabulary // shard.of) - len(head):
            head = torch.cat([head, head.new_zeros(short, it.width)])
        return head

    def _take(
        self, name: str, *shape: int, rows: slice = ALL, columns: slice = ALL, dtype: torch.dtype | None = None
    ) -> Tensor:
        self.parameters += math.prod(shape)
        taken = self._source.take(name, *shape, rows=rows, columns=columns)
        return taken if self._device is None else taken.to(self._device, dtype or self._dtype, copy=True)

    def _norm(self, name: str, size: int) -> Tensor:
        return self._take(f"{name}.weight", size, dtype=torch.float32)

    def _outputs(self, name: str, size: int, biased: bool, part: slice) -> _Linear:
        """Return this rank's part of a linear over the residual stream: the `part` outputs."""
        weight = self._take(f"{name}.weight", size, self._config.width, rows=part)
        return weight, self._take(f"{name}.bias", size, rows=part) if biased else None

    def _inputs(self, name: str, size: int, biased: bool, part: slice) -> _Linear:
        """Return this rank's part of a linear into the residual stream: the `part` inputs, and on rank 0 the bias."""
        weight = self._take(f"{name}.weight", self._config.width, size, columns=part)
        bias = self._take(f"{name}.bias", self._config.width) if biased else None
        return weight, None if self._shard.rank else bias


def _joined(*linears: _Linear) -> _Linear:
    """Join several linears over the same inputs to one."""
    biases = [bias for _, bias in linears if bias is not None]
    return torch.cat([weight for weight, _ in linears]), torch.cat(biases) if biases else None


def complex_rotations(rope: Rope, positions: int, head_dim: int) -> Tensor:
    """Return the rotation of each RoPE pair at each position as a complex number: [positions, head_dim / 2]."""
    return torch.complex(*map(torch.from_numpy, rope.table(positions, head_dim)))
