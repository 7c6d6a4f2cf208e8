"""The weights of a Llama-family model, arranged for few operations a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outrider.engine.checkpoint import ModelConfig, Weights
from outrider.engine.linear import Linear, float_linear
from outrider.engine.quantized import int4_linear, int8_linear
from outrider.engine.rope import interleave

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
    """All weights of a model."""

    embedding: Tensor  # [vocabulary, width], as the checkpoint stores it
    layers: tuple[Layer, ...]
    norm: RMSNorm
    head: Linear  # [vocabulary, width]
    parameters: int  # that were read

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


def load_model(weights: Weights, config: ModelConfig, dtype: Dtype, kept: Iterable[int]) -> Model:
    """Reads, quantizes and packs the `kept` layers of a checkpoint and what all models need, one after another.

    Raises CheckpointError; ConfigError where a weight cannot be had in that type.
    """
    counted = 0

    def take(name: str, *shape: int) -> Tensor:
        nonlocal counted
        tensor = weights.take(name, *shape)
        counted += tensor.numel()
        return tensor

    def norm(name: str, size: int) -> RMSNorm:
        return RMSNorm(take(f"{name}.weight", size), config.eps)

    def parts(name: str, rows: int, columns: int, biased: bool) -> _Parts:
        return take(f"{name}.weight", rows, columns), take(f"{name}.bias", rows) if biased else None

    def group_first(rows: Tensor) -> Tensor:
        """Rows ordered (kv head, group, dim), reordered to (group, kv head, dim)."""
        shaped = rows.reshape(config.kv_heads, config.group, config.head_dim, *rows.shape[1:])
        return shaped.transpose(0, 1).reshape(rows.shape)

    def layer(index: int) -> Layer:
        prefix = f"model.layers.{index}"
        attention, ffn = f"{prefix}.self_attn", f"{prefix}.mlp"
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        q = parts(f"{attention}.q_proj", queries, config.width, config.qkv_bias)
        k = parts(f"{attention}.k_proj", keys, config.width, config.qkv_bias)
        v = parts(f"{attention}.v_proj", keys, config.width, config.qkv_bias)
        q = _each(q, lambda rows: group_first(interleave(rows, config.head_dim)))
        k = _each(k, lambda rows: interleave(rows, config.head_dim))
        out = parts(f"{attention}.o_proj", config.width, queries, config.output_bias)
        gate = parts(f"{ffn}.gate_proj", config.ffn, config.width, config.ffn_bias)
        up = parts(f"{ffn}.up_proj", config.ffn, config.width, config.ffn_bias)
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
            down=make_linear(*parts(f"{ffn}.down_proj", config.width, config.ffn, config.ffn_bias), dtype),
        )

    # A copy: what `take` gives may be a view of the file.
    embedding = take("model.embed_tokens.weight", config.vocabulary, config.width).clone()
    layers = tuple(layer(index) for index in kept)
    last = norm("model.norm", config.width)
    head = embedding if config.tied else take("lm_head.weight", config.vocabulary, config.width)
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
