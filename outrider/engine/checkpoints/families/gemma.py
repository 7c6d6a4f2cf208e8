"""Gemma 2 and 3 (text): windows in most layers, norms before and behind each part, GELU, scaled embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.engine.checkpoints.families.family import PARTS, SLIDING, Family, windows_of
from outrider.engine.checkpoints.fields import ConfigFields
from outrider.engine.checkpoints.gguf.header import GgufFile
from outrider.engine.checkpoints.model_config import LayerAttention, LayerParts, ModelConfig
from outrider.engine.checkpoints.rope import Rope

PERIODS = {"gemma2": 2, "gemma3": 6}  # of layers the last has no window
LOCAL_THETA = 10_000.0  # of RoPE in Gemma 3's layers with a window
LAYERS_27B = 62, 46  # of the two models whose queries are scaled by their width over their heads


def _described(config: ModelConfig, attention: Sequence[LayerAttention], **more: Any) -> Mapping[str, Any]:
    parts = LayerParts(
        activation="gelu_tanh",
        post_norms=True,
        embedding_scale=config.width**0.5,
        attention=tuple(attention),
        **more,
    )
    return {"head_norms": config.model_type != "gemma2", "parts": parts}


def _describe(fields: ConfigFields, config: ModelConfig) -> Mapping[str, Any]:
    fields.only("hidden_activation", "gelu_pytorch_tanh")
    fields.only("use_bidirectional_attention", False)
    second = config.model_type == "gemma2"
    period = fields.count("sliding_window_pattern", PERIODS["gemma2" if second else "gemma3"])
    windows = windows_of(
        fields, config.layers, fields.count("sliding_window", 4096), lambda layer: (layer + 1) % period == 0
    )
    local = config.rope
    if not second:
        named = {"rope_theta": fields.real("rope_local_base_freq", LOCAL_THETA)}
        local = Rope.from_config({"rope_parameters": fields.within("rope_parameters", SLIDING) or named}, fields.path)
    return _described(
        config,
        [LayerAttention(one, local if one else config.rope) for one in windows],
        norm_offset=1.0,  # weights of norms are stored less 1
        query_scale=fields.real("query_pre_attn_scalar", 256.0) ** -0.5,
        score_cap=fields.real("attn_logit_softcapping", 50.0 if second else 0.0),
        logit_cap=fields.real("final_logit_softcapping", 30.0 if second else 0.0),
    )


def _describe_gguf(file: GgufFile, config: ModelConfig) -> Mapping[str, Any]:
    """The converter has added 1 to the weights of norms; the pattern of windows and the scale of queries are not in the
    file.
    """
    kind = file.text("general.architecture")
    window, period = file.number(f"{kind}.attention.sliding_window"), PERIODS[kind]
    local = Rope(LOCAL_THETA, None) if kind == "gemma3" else config.rope
    attention = [
        LayerAttention(0, config.rope) if (layer + 1) % period == 0 else LayerAttention(window, local)
        for layer in range(config.layers)
    ]
    scaled_by = config.width // config.heads if config.layers in LAYERS_27B else config.head_dim
    caps = {} if kind == "gemma3" else {
        "score_cap": file.real(f"{kind}.attn_logit_softcapping", 50.0),
        "logit_cap": file.real(f"{kind}.final_logit_softcapping", 30.0),
    }  # fmt: skip
    return _described(config, attention, query_scale=scaled_by**-0.5, **caps)


_NAMES = {
    **PARTS,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FAMILIES = (
    Family(("gemma2",), ("gemma2",), _describe, _describe_gguf, _NAMES, tied=True),
    Family(("gemma3_text",), ("gemma3",), _describe, _describe_gguf, _NAMES, tied=True, theta=1_000_000.0),
)
