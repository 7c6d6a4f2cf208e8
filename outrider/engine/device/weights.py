"""A model's weights as plain tensors on a device, a layer's together, so that one function serves all layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.engine.checkpoint import ALL, ModelConfig
from outrider.engine.sharding import Shard


class Source(Protocol):
    """Where weights come from: `outrider.engine.checkpoint.Weights`, or what makes them."""

    def take(self, name: str, *shape: int, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """A tensor of that shape, or a part of it."""


class LayerWeights(NamedTuple):
    """One layer. Linears are [outputs, inputs] in the weights' type, norms float32.

    Query heads are ordered group first, so that the queries which share a KV head are neighbours in one attention call
    without a copy; `output` takes them so. Queries and keys keep the checkpoint's halves of a RoPE pair.
    """

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


class ModelWeights(NamedTuple):
    """All of a model, or a rank's part of it."""

    embedding: Tensor  # [vocabulary, width / ranks]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [width] float32
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
    counted = 0
    own = shard.config(config)
    units, channels, ids = shard.part(config.ffn), shard.part(config.width), shard.tokens(config.vocabulary)
    queries, heads = shard.part(config.heads, config.head_dim), shard.kv_heads(config)
    keys = slice(heads.start * config.head_dim, heads.stop * config.head_dim)

    def take(name: str, *shape: int, rows: slice = ALL, columns: slice = ALL, kind: torch.dtype = dtype) -> Tensor:
        nonlocal counted
        counted += torch.Size(shape).numel()
        # A copy: what is taken may be a view of the file.
        return source.take(name, *shape, rows=rows, columns=columns).to(device, kind, copy=True)

    def norm(name: str, size: int) -> Tensor:
        return take(f"{name}.weight", size, kind=torch.float32)

    def outputs(name: str, size: int, biased: bool, part: slice) -> tuple[Tensor, Tensor | None]:
        weight = take(f"{name}.weight", size, config.width, rows=part)
        return weight, take(f"{name}.bias", size, rows=part) if biased else None

    def inputs(name: str, size: int, biased: bool, part: slice) -> tuple[Tensor, Tensor | None]:
        weight = take(f"{name}.weight", config.width, size, columns=part)
        bias = take(f"{name}.bias", config.width) if biased else None
        return weight, None if shard.rank else bias

    def group_first(rows: Tensor) -> Tensor:
        """Rows ordered (kv head, group, dim), reordered to (group, kv head, dim)."""
        shaped = rows.reshape(own.kv_heads, own.group, own.head_dim, *rows.shape[1:])
        return shaped.transpose(0, 1).reshape(rows.shape)

    def layer(index: int) -> LayerWeights:
        prefix = f"model.layers.{index}"
        attention, ffn = f"{prefix}.self_attn", f"{prefix}.mlp"
        query_size, key_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        query, query_bias = outputs(f"{attention}.q_proj", query_size, config.qkv_bias, queries)
        key, key_bias = outputs(f"{attention}.k_proj", key_size, config.qkv_bias, keys)
        value, value_bias = outputs(f"{attention}.v_proj", key_size, config.qkv_bias, keys)
        out, out_bias = inputs(f"{attention}.o_proj", query_size, config.output_bias, queries)
        gate, gate_bias = outputs(f"{ffn}.gate_proj", config.ffn, config.ffn_bias, units)
        up, up_bias = outputs(f"{ffn}.up_proj", config.ffn, config.ffn_bias, units)
        down, down_bias = inputs(f"{ffn}.down_proj", config.ffn, config.ffn_bias, units)
        normed = config.head_norms
        return LayerWeights(
            attention_norm=norm(f"{prefix}.input_layernorm", config.width),
            qkv=torch.cat([group_first(query), key, value]),
            qkv_bias=_joined(query_bias if query_bias is None else group_first(query_bias), key_bias, value_bias),
            query_norm=norm(f"{attention}.q_norm", config.head_dim) if normed else None,
            key_norm=norm(f"{attention}.k_norm", config.head_dim) if normed else None,
            output=group_first(out.T).T.contiguous(),
            output_bias=out_bias,
            ffn_norm=norm(f"{prefix}.post_attention_layernorm", config.width),
            gate_up=torch.cat([gate, up]),
            gate_up_bias=_joined(gate_bias, up_bias),
            down=down,
            down_bias=down_bias,
        )

    vocabulary = config.vocabulary, config.width
    embedding = take("model.embed_tokens.weight", *vocabulary, columns=channels)
    layers = tuple(layer(index) for index in kept)
    last = norm("model.norm", config.width)
    if config.tied and shard.of == 1:
        return ModelWeights(embedding, layers, last, embedding, counted)
    if config.tied:
        counted -= torch.Size(vocabulary).numel()
    head = take("model.embed_tokens.weight" if config.tied else "lm_head.weight", *vocabulary, rows=ids)
    if short := -(-config.vocabulary // shard.of) - len(head):  # ranks give equally many logits
        head = torch.cat([head, head.new_zeros(short, config.width)])
    return ModelWeights(embedding, layers, last, head, counted)


def _joined(*parts: Tensor | None) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None
