"""Qwen 3 Next and Qwen 3.5: the gated delta rule in most layers, attention with gated outputs in the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.engine.checkpoints.families.family import FULL, PARTS, Family
from outrider.engine.checkpoints.families.mixtures import qwen_experts
from outrider.engine.checkpoints.fields import ConfigFields
from outrider.engine.checkpoints.gguf.header import GgufFile
from outrider.engine.checkpoints.model_config import DeltaRule, Experts, LayerParts, ModelConfig

LINEAR = "linear_attention"
PERIOD = 4  # of layers the last attends


def _described(delta: DeltaRule, experts: Experts | None, turned: int, **more: Any) -> Mapping[str, Any]:
    return {"head_norms": True, "parts": LayerParts(gated=True, turned=turned, experts=experts, delta=delta, **more)}


def _describe(fields: ConfigFields, config: ModelConfig) -> Mapping[str, Any]:
    rope = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    share = ConfigFields(fields.path, fields.values | rope).real("partial_rotary_factor", 0.25)
    delta = DeltaRule(
        key_heads=fields.count("linear_num_key_heads"),
        value_heads=fields.count("linear_num_value_heads"),
        key_dim=fields.count("linear_key_head_dim"),
        value_dim=fields.count("linear_value_head_dim"),
        taps=fields.count("linear_conv_kernel_dim", 4),
        joined=config.model_type == "qwen3_next",
        tiled=False,
        logged=True,
        layers=_with_rule(fields, config),
    )
    _check(delta, lambda field, allowed: fields.wrong(f"linear_{field}", allowed))
    experts = qwen_experts(fields, config, even=True) if "num_experts" in fields.values else None
    return _described(delta, experts, int(config.head_dim * share), norm_offset=1.0)


def _with_rule(fields: ConfigFields, config: ModelConfig) -> tuple[bool, ...]:
    """Return whether each layer has the rule."""
    period = fields.count("full_attention_interval", PERIOD)
    kinds = fields.values.get("layer_types") or _regular(config.layers, period)
    if not isinstance(kinds, list) or len(kinds) != config.layers or not {*kinds} <= {LINEAR, FULL}:
        raise fields.wrong("layer_types", f"{LINEAR} or {FULL} for each of the {config.layers} layers")
    return tuple(kind == LINEAR for kind in kinds)


def _regular(layers: int, period: int) -> Sequence[str]:
    return [LINEAR if (layer + 1) % period else FULL for layer in range(layers)]


def _check(delta: DeltaRule, wrong: Any) -> None:
    """Raise CheckpointError for sizes that the engine does not compute."""
    if delta.value_heads % delta.key_heads:
        raise wrong("num_value_heads", f"a multiple of the {delta.key_heads} key heads")
    for field, size in (("key_head_dim", delta.key_dim), ("value_head_dim", delta.value_dim)):
        if size % 16 or size > 4096:
            raise wrong(field, "a multiple of 16, at most 4096")
    if not 2 <= delta.taps <= 4:
        raise wrong("conv_kernel_dim", "2, 3 or 4")
    if all(delta.layers):
        raise wrong("layer_types", "such that a layer attends")


def _describe_gguf(file: GgufFile, config: ModelConfig) -> Mapping[str, Any]:
    kind = file.text("general.architecture")
    values = file.number(f"{kind}.ssm.inner_size")
    heads = file.number(f"{kind}.ssm.time_step_rank")
    period = file.number(f"{kind}.full_attention_interval", PERIOD)
    delta = DeltaRule(
        key_heads=file.number(f"{kind}.ssm.group_count"),
        value_heads=heads,
        key_dim=file.number(f"{kind}.ssm.state_size"),
        value_dim=values // heads,
        taps=file.number(f"{kind}.ssm.conv_kernel"),
        joined=False,
        tiled=kind != "qwen3next",
        logged=False,
        layers=tuple(kind == LINEAR for kind in _regular(config.layers, period)),
    )
    _check(delta, lambda field, allowed: file.wrong(f"{kind}.ssm", f"{field} {allowed}"))
    experts = None
    if file.single(f"{kind}.expert_count"):
        experts = Experts(
            file.number(f"{kind}.expert_count"),
            file.number(f"{kind}.expert_used_count"),
            file.number(f"{kind}.expert_feed_forward_length"),
            even=True,
            layers=(True,) * config.layers,
            shared=file.number(f"{kind}.expert_shared_feed_forward_length"),
        )
    return _described(delta, experts, file.number(f"{kind}.rope.dimension_count", config.head_dim))


_NAMES = {
    **PARTS,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_WHOLE = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
FAMILIES = (
    Family(("qwen3_next",), (), _describe, mixture=True),
    Family(("qwen3_5_text",), ("qwen35",), _describe, _describe_gguf, _NAMES, whole=_WHOLE),
    Family(("qwen3_5_moe_text",), ("qwen35moe",), _describe, _describe_gguf, _NAMES, mixture=True, whole=_WHOLE),
)
