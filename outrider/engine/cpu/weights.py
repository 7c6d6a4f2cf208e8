"""A checkpoint's tensors, one after another, into the compiled model, which packs them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from outrider.engine.checkpoint import ModelConfig, Weights

if TYPE_CHECKING:
    from outrider._native import Model

Named = tuple[str, *tuple[int, ...]]  # a tensor and its shape


def check_layers(source: Weights, config: ModelConfig, kept: Sequence[int]) -> int:
    """Gives the number of parameters of the `kept` layers and both ends. Raises CheckpointError for a tensor that is
    missing or of another shape, before anything of that shape is made."""
    named = [shape for layer in kept for shape in _layer(config, f"model.layers.{layer}") if shape is not None]
    named += _ends(config)
    for name, *shape in named:
        source.check(name, *shape)
    return sum(math.prod(shape) for _, *shape in named)


def load_layers(model: Model, source: Weights, config: ModelConfig, kept: Sequence[int]) -> None:
    """Reads the `kept` layers and both ends; bfloat16 as the bits of it. Raises CheckpointError."""

    def take(named: Named | None) -> NDArray[Any] | None:
        return None if named is None else source.array(*named)

    for index, layer in enumerate(kept):
        model.set_layer(index, *map(take, _layer(config, f"model.layers.{layer}")))
    embedding, norm, *head = (source.array(*named) for named in _ends(config))
    model.set_ends(embedding, norm, head[0] if head else embedding)


def _ends(it: ModelConfig) -> list[Named]:
    head: list[Named] = [] if it.tied else [("lm_head.weight", it.vocabulary, it.width)]
    return [("model.embed_tokens.weight", it.vocabulary, it.width), ("model.norm.weight", it.width), *head]


def _layer(it: ModelConfig, prefix: str) -> list[Named | None]:
    """In the order of `Model.set_layer`; None for what such a model does not have."""
    attention, ffn = f"{prefix}.self_attn", f"{prefix}.mlp"
    queries, keys = it.heads * it.head_dim, it.kv_heads * it.head_dim
    return [
        (f"{prefix}.input_layernorm.weight", it.width),
        (f"{attention}.q_proj.weight", queries, it.width),
        (f"{attention}.k_proj.weight", keys, it.width),
        (f"{attention}.v_proj.weight", keys, it.width),
        (f"{attention}.q_proj.bias", queries) if it.qkv_bias else None,
        (f"{attention}.k_proj.bias", keys) if it.qkv_bias else None,
        (f"{attention}.v_proj.bias", keys) if it.qkv_bias else None,
        (f"{attention}.q_norm.weight", it.head_dim) if it.head_norms else None,
        (f"{attention}.k_norm.weight", it.head_dim) if it.head_norms else None,
        (f"{attention}.o_proj.weight", it.width, queries),
        (f"{attention}.o_proj.bias", it.width) if it.output_bias else None,
        (f"{prefix}.post_attention_layernorm.weight", it.width),
        (f"{ffn}.gate_proj.weight", it.ffn, it.width),
        (f"{ffn}.up_proj.weight", it.ffn, it.width),
        (f"{ffn}.gate_proj.bias", it.ffn) if it.ffn_bias else None,
        (f"{ffn}.up_proj.bias", it.ffn) if it.ffn_bias else None,
        (f"{ffn}.down_proj.weight", it.width, it.ffn),
        (f"{ffn}.down_proj.bias", it.width) if it.ffn_bias else None,
    ]
