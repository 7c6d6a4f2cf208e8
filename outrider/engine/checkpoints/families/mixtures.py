"""Mixtures of experts whose layers are else those of Llama or Qwen: Qwen 2 and 3 MoE, Mixtral, OLMoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.engine.checkpoints.families.family import Family
from outrider.engine.checkpoints.fields import ConfigFields
from outrider.engine.checkpoints.gguf.header import GgufFile
from outrider.engine.checkpoints.model_config import Experts, LayerParts, ModelConfig


def qwen_experts(fields: ConfigFields, config: ModelConfig, *, shared: bool = True, even: bool = False) -> Experts:
    """Return the experts of a Qwen model. Raises CheckpointError.

    `shared`: whether there is one that all tokens have; `even`: `Experts.even` where the fields do not say.
    """
    step, dense = fields.count("decoder_sparse_step", 1), fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise fields.wrong("mlp_only_layers", "a list of layers")
    return Experts(
        fields.count("num_experts" if "num_experts" in fields.values else "num_local_experts"),
        fields.count("num_experts_per_tok"),
        fields.count("moe_intermediate_size"),
        fields.flag("norm_topk_prob", default=even),
        tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(config.layers)),
        fields.count("shared_expert_intermediate_size") if shared else 0,
    )


def _qwen3_moe(fields: ConfigFields, config: ModelConfig) -> Mapping[str, Any]:
    fields.only("use_sliding_window", False)
    return {"head_norms": True, "parts": LayerParts(experts=qwen_experts(fields, config, shared=False))}


def _qwen2_moe(fields: ConfigFields, config: ModelConfig) -> Mapping[str, Any]:
    fields.only("use_sliding_window", False)
    biased = fields.flag("qkv_bias", default=True)
    return {"qkv_bias": biased, "parts": LayerParts(experts=qwen_experts(fields, config))}


def _mixtral(fields: ConfigFields, config: ModelConfig) -> Mapping[str, Any]:
    fields.only("sliding_window", None)
    count, used = fields.count("num_local_experts", 8), fields.count("num_experts_per_tok", 2)
    experts = Experts(count, used, config.ffn, even=True, layers=(True,) * config.layers)
    return {"parts": LayerParts(experts=experts)}


def _olmoe(fields: ConfigFields, config: ModelConfig) -> Mapping[str, Any]:
    fields.only("clip_qkv", None)
    count, used = fields.count("num_experts", 64), fields.count("num_experts_per_tok", 8)
    experts = Experts(count, used, config.ffn, fields.flag("norm_topk_prob"), (True,) * config.layers)
    return {"head_norms": True, "parts": LayerParts(whole_norms=True, experts=experts)}


def _of_gguf(file: GgufFile, config: ModelConfig) -> Mapping[str, Any]:
    kind = file.text("general.architecture")
    experts = Experts(
        file.number(f"{kind}.expert_count"),
        file.number(f"{kind}.expert_used_count"),
        file.number(f"{kind}.expert_feed_forward_length", config.ffn),
        even=kind not in ("olmoe", "qwen2moe"),
        layers=(True,) * config.layers,
        shared=file.number(f"{kind}.expert_shared_feed_forward_length") if kind == "qwen2moe" else 0,
    )
    return {"head_norms": kind != "qwen2moe", "parts": LayerParts(whole_norms=kind == "olmoe", experts=experts)}


_MIXTRAL = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
FAMILIES = (
    Family(("qwen2_moe",), ("qwen2moe",), _qwen2_moe, _of_gguf, mixture=True),
    Family(("qwen3_moe",), ("qwen3moe",), _qwen3_moe, _of_gguf, mixture=True),
    Family(("mixtral",), (), _mixtral, mixture=True, renamed=_MIXTRAL),  # in GGUF files its architecture is llama
    Family(("olmoe",), ("olmoe",), _olmoe, _of_gguf, mixture=True),
)
