"""Llama (1 to 3), and families whose layers have the same parts: Mistral, Qwen 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.engine.checkpoints.families.family import Family, windows_of
from outrider.engine.checkpoints.fields import ConfigFields
from outrider.engine.checkpoints.model_config import LayerAttention, LayerParts, ModelConfig


def _windows(fields: ConfigFields, config: ModelConfig, full: int = 0) -> Mapping[str, Any]:
    """Describe windows that are shorter than the context. `full`: the first layers, which have none."""
    if fields.values.get("sliding_window") is None or (window := fields.count("sliding_window")) >= config.context:
        return {}
    windows = windows_of(fields, config.layers, window, lambda layer: layer < full)
    return {"parts": LayerParts(attention=tuple(LayerAttention(one, config.rope) for one in windows))}


def _of_qwen(fields: ConfigFields, config: ModelConfig) -> Mapping[str, Any]:
    if not fields.flag("use_sliding_window"):
        return {}
    return _windows(fields, config, fields.count("max_window_layers", config.layers))


def _qwen2(fields: ConfigFields, config: ModelConfig) -> Mapping[str, Any]:
    return {"qkv_bias": True, **_of_qwen(fields, config)}


def _qwen3(fields: ConfigFields, config: ModelConfig) -> Mapping[str, Any]:
    return {"head_norms": True, **_of_qwen(fields, config)}


FAMILIES = (
    Family(("llama",), ("llama",), neighbours=True, like_llama=True),
    Family(("mistral", "ministral"), (), _windows, like_llama=True),  # in GGUF files its architecture is llama
    Family(("qwen2",), ("qwen2",), _qwen2, like_llama=True),
    Family(("qwen3",), ("qwen3",), _qwen3, lambda file, config: {"head_norms": True}, like_llama=True),
)
