"""Granite (dense): embeddings, scores, what layers add and logits are multiplied by constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.engine.checkpoints.families.family import Family
from outrider.engine.checkpoints.fields import ConfigFields
from outrider.engine.checkpoints.gguf.header import GgufFile
from outrider.engine.checkpoints.model_config import LayerParts, ModelConfig


def _described(embedding: float, residual: float, query: float, logits: float) -> Mapping[str, Any]:
    parts = LayerParts(embedding_scale=embedding, residual_scale=residual, query_scale=query, logit_scale=1.0 / logits)
    return {"parts": parts}


def _describe(fields: ConfigFields, config: ModelConfig) -> Mapping[str, Any]:
    names = "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"
    return _described(*(fields.real(name, 1.0) for name in names))


def _describe_gguf(file: GgufFile, config: ModelConfig) -> Mapping[str, Any]:
    names = "embedding_scale", "residual_scale", "attention.scale", "logit_scale"
    return _described(*(file.real(f"granite.{name}") for name in names))


FAMILY = Family(("granite",), ("granite",), _describe, _describe_gguf, neighbours=True)
