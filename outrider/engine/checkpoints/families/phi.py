"""Phi 3 and 4: joined tensors, windows, and RoPE over a part of each head.

Of the versions for long texts, whose RoPE changes when a text is longer than those that the model first learned from,
this engine runs texts up to there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.engine.checkpoints.families.family import PARTS, Family
from outrider.engine.checkpoints.fields import ConfigFields
from outrider.engine.checkpoints.gguf.header import GgufFile
from outrider.engine.checkpoints.model_config import LayerAttention, LayerParts, ModelConfig
from outrider.engine.checkpoints.rope import LongScaling, Rope


def _described(config: ModelConfig, rope: Rope, turned: int, window: int) -> Mapping[str, Any]:
    context = config.context
    if isinstance(rope.scaling, LongScaling):
        context = min(context, rope.scaling.original_context)
    attention = (LayerAttention(0 if window >= context else window, rope),) * config.layers
    return {"context": context, "rope": rope, "parts": LayerParts(joined=True, turned=turned, attention=attention)}


def _describe(fields: ConfigFields, config: ModelConfig) -> Mapping[str, Any]:
    used = fields.values.get("sliding_window") is not None
    rope = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    share = ConfigFields(fields.path, fields.values | rope).real("partial_rotary_factor", 1.0)
    turned = int(config.head_dim * share)
    return _described(config, config.rope, turned, fields.count("sliding_window") if used else config.context)


def _describe_gguf(file: GgufFile, config: ModelConfig) -> Mapping[str, Any]:
    window = file.number("phi3.attention.sliding_window") if file.single("phi3.attention.sliding_window") else 0
    return _described(config, config.rope, file.number("phi3.rope.dimension_count", config.head_dim), window)


_NAMES = {**PARTS, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
FAMILY = Family(("phi3",), ("phi3",), _describe, _describe_gguf, _NAMES)
