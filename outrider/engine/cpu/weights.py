"""Loads a checkpoint's tensors, or a rank's parts of them, one after another into the compiled model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.checkpoints.checkpoint import ModelConfig, Weights
from outrider.engine.checkpoints.stored_tensors import ALL
from outrider.engine.tensor_parallel.sharding import Shard

if TYPE_CHECKING:
    from outrider._native import Model


class _Part(NamedTuple):
    """A tensor and the part of it that a rank holds."""

    name: str
    shape: tuple[int, ...]  # of the complete tensor
    rows: slice = ALL
    columns: slice = ALL


def check_layers(source: Weights, config: ModelConfig, kept: Sequence[int]) -> int:
    """Return the number of parameters of the `kept` layers, embedding, last norm and head, on all ranks.

    Raises CheckpointError for a tensor that is missing or has another shape, before memory of that shape is allocated.
    """
    parts = [part for layer in kept for part in _layer(config, Shard(), f"model.layers.{layer}")]
    parts += _ends(config, Shard())
    shapes = {part.name: part.shape for part in parts if part is not None}
    for name, shape in shapes.items():
        source.check(name, *shape)
    return sum(map(math.prod, shapes.values()))


def load_layers(model: Model, source: Weights, config: ModelConfig, shard: Shard, kept: Sequence[int]) -> None:
    """Load the `kept` layers, embedding, last norm and head into a model; bfloat16 as its bits.

    `config`: that of the complete model. Raises CheckpointError.
    """

    def take(part: _Part | None) -> NDArray[Any] | None:
        if part is None:
            return None
        return np.ascontiguousarray(source.array(part.name, *part.shape, rows=part.rows, columns=part.columns))

    for index, layer in enumerate(kept):
        model.set_layer(index, *map(take, _layer(config, shard, f"model.layers.{layer}")))
    embedding, norm, head = map(take, _ends(config, shard))
    assert norm is not None
    assert head is not None
    missing = -(-config.vocabulary // shard.of) - len(head)  # ranks have equally many rows
    model.set_ends(embedding, norm, np.pad(head, ((0, missing), (0, 0))) if missing else head)


def _ends(it: ModelConfig, shard: Shard) -> list[_Part | None]:
    """Return embedding, last norm and head, in the order of `Model.set_ends`; None where the head is the embedding."""
    matrix, embedding = (it.vocabulary, it.width), "model.embed_tokens.weight"
    return [
        None if it.tied and shard.of == 1 else _Part(embedding, matrix, columns=shard.part(it.width)),
        _Part("model.norm.weight", (it.width,)),
        _Part(embedding if it.tied else "lm_head.weight", matrix, shard.tokens(it.vocabulary)),
    ]


def _layer(it: ModelConfig, shard: Shard, prefix: str) -> list[_Part | None]:
    """Return a layer's tensors in the order of `Model.set_layer`; None for those that model or rank do not have."""
    attention, ffn = f"{prefix}.self_attn", f"{prefix}.mlp"
    queries, keys = it.heads * it.head_dim, it.kv_heads * it.head_dim
    heads = shard.kv_heads(it)
    shard_queries, shard_units = shard.part(it.heads, it.head_dim), shard.part(it.ffn)
    shard_keys = slice(heads.start * it.head_dim, heads.stop * it.head_dim)

    def outputs(name: str, count: int, part: slice) -> _Part:
        return _Part(f"{name}.weight", (count, it.width), part)

    def inputs(name: str, count: int, part: slice) -> _Part:
        return _Part(f"{name}.weight", (it.width, count), columns=part)

    def vector(name: str, count: int, part: slice = ALL, *, present: bool = True) -> _Part | None:
        return _Part(name, (count,), part) if present else None

    first = not shard.rank  # a bias is added once
    return [
        vector(f"{prefix}.input_layernorm.weight", it.width),
        outputs(f"{attention}.q_proj", queries, shard_queries),
        outputs(f"{attention}.k_proj", keys, shard_keys),
        outputs(f"{attention}.v_proj", keys, shard_keys),
        vector(f"{attention}.q_proj.bias", queries, shard_queries, present=it.qkv_bias),
        vector(f"{attention}.k_proj.bias", keys, shard_keys, present=it.qkv_bias),
        vector(f"{attention}.v_proj.bias", keys, shard_keys, present=it.qkv_bias),
        vector(f"{attention}.q_norm.weight", it.head_dim, present=it.head_norms),
        vector(f"{attention}.k_norm.weight", it.head_dim, present=it.head_norms),
        inputs(f"{attention}.o_proj", queries, shard_queries),
        vector(f"{attention}.o_proj.bias", it.width, present=it.output_bias and first),
        vector(f"{prefix}.post_attention_layernorm.weight", it.width),
        outputs(f"{ffn}.gate_proj", it.ffn, shard_units),
        outputs(f"{ffn}.up_proj", it.ffn, shard_units),
        vector(f"{ffn}.gate_proj.bias", it.ffn, shard_units, present=it.ffn_bias),
        vector(f"{ffn}.up_proj.bias", it.ffn, shard_units, present=it.ffn_bias),
        inputs(f"{ffn}.down_proj", it.ffn, shard_units),
        vector(f"{ffn}.down_proj.bias", it.width, present=it.ffn_bias and first),
    ]
