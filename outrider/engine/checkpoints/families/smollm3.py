"""SmolLM3: every fourth layer has no RoPE (NoPE, arXiv 2501.18795)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.engine.checkpoints.families.family import Family, windows_of
from outrider.engine.checkpoints.fields import ConfigFields
from outrider.engine.checkpoints.gguf.header import GgufFile
from outrider.engine.checkpoints.model_config import LayerAttention, LayerParts, ModelConfig

PERIOD = 4


def _described(config: ModelConfig, turns: Sequence[object], windows: Sequence[int]) -> Mapping[str, Any]:
    attention = [
        LayerAttention(window, config.rope if turn else None) for turn, window in zip(turns, windows, strict=True)
    ]
    return {"parts": LayerParts(attention=tuple(attention))}


def _regular(layers: int, period: int) -> list[bool]:
    return [(layer + 1) % period != 0 for layer in range(layers)]


def _describe(fields: ConfigFields, config: ModelConfig) -> Mapping[str, Any]:
    turns = fields.values.get("no_rope_layers") or _regular(
        config.layers, fields.count("no_rope_layer_interval", PERIOD)
    )
    if not isinstance(turns, list) or len(turns) != config.layers or not {*turns} <= {0, 1}:
        raise fields.wrong("no_rope_layers", f"1 or 0 for each of the {config.layers} layers: whether RoPE turns there")
    windows = [0] * config.layers
    if fields.flag("use_sliding_window"):
        windows = windows_of(fields, config.layers, fields.count("sliding_window"), lambda layer: not turns[layer])
    return _described(config, turns, windows)


def _describe_gguf(file: GgufFile, config: ModelConfig) -> Mapping[str, Any]:
    return _described(config, _regular(config.layers, PERIOD), [0] * config.layers)


FAMILY = Family(("smollm3",), ("smollm3",), _describe, _describe_gguf, tied=True, theta=2_000_000.0, neighbours=True)
