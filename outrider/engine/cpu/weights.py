"""A checkpoint's tensors, one after another, into the compiled model, which packs them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from outrider.engine.checkpoint import ModelConfig, Weights

if TYPE_CHECKING:
    from outrider._native import Model


def load_layers(model: Model, source: Weights, config: ModelConfig, kept: Sequence[int]) -> int:
    """Reads the `kept` layers and both ends. Gives the number of parameters. Raises CheckpointError."""
    reader = _Reader(source)
    for index, layer in enumerate(kept):
        model.set_layer(index, *_layer(reader, config, f"model.layers.{layer}"))
    embedding = reader.take("model.embed_tokens.weight", config.vocabulary, config.width)
    head = embedding if config.tied else reader.take("lm_head.weight", config.vocabulary, config.width)
    model.set_ends(embedding, reader.take("model.norm.weight", config.width), head)
    return reader.parameters


class _Reader:
    def __init__(self, source: Weights) -> None:
        self._source = source
        self.parameters = 0

    def take(self, name: str, *shape: int) -> NDArray[Any]:
        """As it is stored; the bits of bfloat16 as uint16."""
        self.parameters += math.prod(shape)
        return self._source.array(name, *shape)

    def maybe(self, there: bool, name: str, *shape: int) -> NDArray[Any] | None:
        return self.take(name, *shape) if there else None


def _layer(reader: _Reader, it: ModelConfig, prefix: str) -> list[NDArray[Any] | None]:
    """In the order of `Model.set_layer`."""
    attention, ffn = f"{prefix}.self_attn", f"{prefix}.mlp"
    queries, keys = it.heads * it.head_dim, it.kv_heads * it.head_dim
    return [
        reader.take(f"{prefix}.input_layernorm.weight", it.width),
        reader.take(f"{attention}.q_proj.weight", queries, it.width),
        reader.take(f"{attention}.k_proj.weight", keys, it.width),
        reader.take(f"{attention}.v_proj.weight", keys, it.width),
        reader.maybe(it.qkv_bias, f"{attention}.q_proj.bias", queries),
        reader.maybe(it.qkv_bias, f"{attention}.k_proj.bias", keys),
        reader.maybe(it.qkv_bias, f"{attention}.v_proj.bias", keys),
        reader.maybe(it.head_norms, f"{attention}.q_norm.weight", it.head_dim),
        reader.maybe(it.head_norms, f"{attention}.k_norm.weight", it.head_dim),
        reader.take(f"{attention}.o_proj.weight", it.width, queries),
        reader.maybe(it.output_bias, f"{attention}.o_proj.bias", it.width),
        reader.take(f"{prefix}.post_attention_layernorm.weight", it.width),
        reader.take(f"{ffn}.gate_proj.weight", it.ffn, it.width),
        reader.take(f"{ffn}.up_proj.weight", it.ffn, it.width),
        reader.maybe(it.ffn_bias, f"{ffn}.gate_proj.bias", it.ffn),
        reader.maybe(it.ffn_bias, f"{ffn}.up_proj.bias", it.ffn),
        reader.take(f"{ffn}.down_proj.weight", it.width, it.ffn),
        reader.maybe(it.ffn_bias, f"{ffn}.down_proj.bias", it.width),
    ]
