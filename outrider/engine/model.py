"""The weights of a Llama-family model, arranged for few operations a layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outrider.engine.checkpoint import ALL, ModelConfig, Weights
from outrider.engine.linear import Linear, float_linear
from outrider.engine.quantized import int4_linear, int8_linear
from outrider.engine.rope import interleave
from outrider.engine.sharding import Shard

Dtype = Literal["float32", "bfloat16", "int8", "int4"]  # of the layers' linears
# Of the head. Quantized models have it in int8: beside their layers in float32 it would be half of a small model.
HEADS: dict[Dtype, Dtype] = {"float32": "float32", "bfloat16": "float32", "int8": "int8", "int4": "int8"}


class RMSNorm:
    """`x / sqrt(mean(x**2) + eps) * weight` over the last dimension, in float32 (arXiv 1910.07467).

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
class Layer:
    """One transformer layer.

    `qkv` gives [rows, (heads + 2 * kv_heads) * head_dim]. Query heads are ordered group first, so that the queries
    which share a KV head fold into the rows of one attention call without a copy, and `output` takes them so.
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
class Model:
    """All weights of a model, or a rank's part of them: the shapes are then those of its part of the configuration."""

    embedding: Tensor  # [vocabulary, width / ranks], as the checkpoint stores it
    layers: tuple[Layer, ...]
    norm: RMSNorm
    head: Linear  # [vocabulary / ranks, width]
    parameters: int  # of the layers that were read, on all ranks

    @property
    def bytes_of_a_pass(self) -> int:
        """Bytes of weights that every pass reads: the linears of all layers, and the head."""
        linears = [linear for it in self.layers for linear in (it.qkv, it.output, it.gate_up, it.down)]
        return sum(linear.bytes for linear in (*linears, self.head))


def make_linear(weight: Tensor, bias: Tensor | None, dtype: Dtype) -> Linear:
    """A linear layer whose weight is kept in that type. Raises ConfigError when there is no kernel for its shape."""
    match dtype:
        case "int8":
            return int8_linear(weight, bias)
        case "int4":
            return int4_linear(weight, bias)
        case _:
            return float_linear(weight, bias, torch.float32 if dtype == "float32" else torch.bfloat16)


def load_model(weights: Weights, config: ModelConfig, shard: Shard, dtype: Dtype, kept: Iterable[int]) -> Model:
    """Reads, quantizes and packs the `kept` layers of a checkpoint and what all models need, one after another.

    Of each weight only what `shard` holds is read. `config` is the whole model's.

    Raises CheckpointError; ConfigError where a weight cannot be had in that type.
    """
    counted = 0

    def take(name: str, *shape: int, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        nonlocal counted
        counted += math.prod(shape)
        return weights.take(name, *shape, rows=rows, columns=columns)

    def norm(name: str, size: int) -> RMSNorm:
        return RMSNorm(take(f"{name}.weight", size), config.eps)

    def outputs(name: str, size: int, biased: bool, own: slice) -> _Parts:
        """A linear over the residual stream, of which this rank computes the `own` outputs."""
        weight = take(f"{name}.weight", size, config.width, rows=own)
        return weight, take(f"{name}.bias", size, rows=own) if biased else None

    def inputs(name: str, size: int, biased: bool, own: slice) -> _Parts:
        """A linear into the residual stream, of which this rank has the `own` inputs. Rank 0 adds the bias."""
        weight = take(f"{name}.weight", config.width, size, columns=own)
        bias = take(f"{name}.bias", config.width) if biased else None
        return weight, None if shard.rank else bias

    def group_first(rows: Tensor) -> Tensor:
        """Rows ordered (kv head, group, dim), reordered to (group, kv head, dim)."""
        shaped = rows.reshape(own.kv_heads, own.group, own.head_dim, *rows.shape[1:])
        return shaped.transpose(0, 1).reshape(rows.shape)

    def layer(index: int) -> Layer:
        prefix = f"model.layers.{index}"
        attention, ffn = f"{prefix}.self_attn", f"{prefix}.mlp"
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        q = outputs(f"{attention}.q_proj", queries, config.qkv_bias, own_queries)
        k = outputs(f"{attention}.k_proj", keys, config.qkv_bias, own_keys)
        v = outputs(f"{attention}.v_proj", keys, config.qkv_bias, own_keys)
        q = _each(q, lambda rows: group_first(interleave(rows, config.head_dim)))
        k = _each(k, lambda rows: interleave(rows, config.head_dim))
        out = inputs(f"{attention}.o_proj", queries, config.output_bias, own_queries)
        gate = outputs(f"{ffn}.gate_proj", config.ffn, config.ffn_bias, own_units)
        up = outputs(f"{ffn}.up_proj", config.ffn, config.ffn_bias, own_units)
        head_norms = None
        if config.head_norms:
            names = f"{attention}.q_norm.weight", f"{attention}.k_norm.weight"
            q_norm, k_norm = (interleave(take(name, config.head_dim), config.head_dim) for name in names)
            head_norms = RMSNorm(q_norm, config.eps), RMSNorm(k_norm, config.eps)
        return Layer(
            attention_norm=norm(f"{prefix}.input_layernorm", config.width),
            qkv=_fused((q, k, v), dtype),
            head_norms=head_norms,
            output=make_linear(group_first(out[0].T).T, out[1], dtype),
            ffn_norm=norm(f"{prefix}.post_attention_layernorm", config.width),
            gate_up=_fused((gate, up), dtype),
            down=make_linear(*inputs(f"{ffn}.down_proj", config.ffn, config.ffn_bias, own_units), dtype),
        )

    own = shard.config(config)
    own_units, own_channels, own_tokens = (
        shard.part(config.ffn),
        shard.part(config.width),
        shard.tokens(config.vocabulary),
    )
    own_queries, heads = shard.part(config.heads, config.head_dim), shard.kv_heads(config)
    own_keys = slice(heads.start * config.head_dim, heads.stop * config.head_dim)
    vocabulary = config.vocabulary, config.width
    # A copy: what `take` gives may be a view of the file.
    embedding = take("model.embed_tokens.weight", *vocabulary, columns=own_channels).clone()
    layers = tuple(layer(index) for index in kept)
    last = norm("model.norm", config.width)
    if config.tied:
        counted -= math.prod(vocabulary)
    head = take("model.embed_tokens.weight" if config.tied else "lm_head.weight", *vocabulary, rows=own_tokens)
    if short := -(-config.vocabulary // shard.of) - len(head):  # ranks give equally many logits
        head = torch.cat([head, head.new_zeros(short, config.width)])
    return Model(embedding, layers, last, make_linear(head, None, HEADS[dtype]), counted)


_Parts = tuple[Tensor, Tensor | None]  # weight and bias


def _each(parts: _Parts, change: Callable[[Tensor], Tensor]) -> _Parts:
    weight, bias = parts
    return change(weight), None if bias is None else change(bias)


def _fused(parts: tuple[_Parts, ...], dtype: Dtype) -> Linear:
    """Several linears over one input as one."""
    biases = [bias for _, bias in parts if bias is not None]
    weight = torch.cat([weight for weight, _ in parts])
    return make_linear(weight, torch.cat(biases) if biases else None, dtype)
