"""OLMo 2 and 3: norms behind the parts and none before, and over all queries and keys of a layer; 3 has windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.engine.checkpoints.families.family import PARTS, Family, windows_of
from outrider.engine.checkpoints.fields import ConfigFields
from outrider.engine.checkpoints.gguf.header import GgufFile
from outrider.engine.checkpoints.model_config import LayerAttention, LayerParts, ModelConfig

PERIOD = 4  # of OLMo 3's layers the last of four has no window


def _described(config: ModelConfig, attention: Sequence[LayerAttention] = ()) -> Mapping[str, Any]:
    parts = LayerParts(pre_norms=False, post_norms=True, whole_norms=True, attention=tuple(attention))
    return {"head_norms": True, "parts": parts}


def _describe(fields: ConfigFields, config: ModelConfig) -> Mapping[str, Any]:
    if config.model_type == "olmo2":
        return _described(config)
    window = fields.count("sliding_window", 4096)
    windows = windows_of(fields, config.layers, window, lambda layer: (layer + 1) % PERIOD == 0)
    return _described(config, [LayerAttention(one, config.rope) for one in windows])


def _describe_gguf(file: GgufFile, config: ModelConfig) -> Mapping[str, Any]:
    if not file.single("olmo2.attention.sliding_window"):
        return _described(config)
    window = file.number("olmo2.attention.sliding_window")
    windows = [0 if (layer + 1) % PERIOD == 0 else window for layer in range(config.layers)]
    return _described(config, [LayerAttention(one, config.rope) for one in windows])


_NAMES = {
    **{part: name for part, name in PARTS.items() if not part.endswith("_norm")},
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FAMILIES = (
    Family(("olmo2",), ("olmo2",), _describe, _describe_gguf, _NAMES),
    Family(("olmo3",), (), _describe, theta=500_000.0),  # in GGUF files its architecture is olmo2
)
