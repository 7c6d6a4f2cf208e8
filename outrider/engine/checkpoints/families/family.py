"""What a family of models is described by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.engine.checkpoints.fields import ConfigFields
from outrider.engine.checkpoints.gguf.header import GgufFile
from outrider.engine.checkpoints.model_config import ModelConfig

SLIDING, FULL = "sliding_attention", "full_attention"

# Names of a layer's norms and linears in GGUF files, and on the hub.
PARTS: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
EXPERTS: Mapping[str, str] = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}


def as_llama(source: object, config: ModelConfig) -> Mapping[str, Any]:
    """Describe a family that is like Llama."""
    return {}


@dataclass(frozen=True, slots=True)
class Family:
    """A family. Its descriptions get a configuration that is like Llama's, and return the fields that differ; they
    raise CheckpointError for what the engine lacks.
    """

    model_types: tuple[str, ...]  # in a config.json
    architectures: tuple[str, ...]  # in a GGUF file
    describe: Callable[[ConfigFields, ModelConfig], Mapping[str, Any]] = as_llama
    describe_gguf: Callable[[GgufFile, ModelConfig], Mapping[str, Any]] = as_llama
    names: Mapping[str, str] | None = None  # of parts of a layer, in GGUF files and on the hub; None: as PARTS
    tied: bool = False  # whether the head is the embedding where a config.json does not say
    theta: float = 10_000.0  # of RoPE where it does not say
    neighbours: bool = False  # whether GGUF files have the rows of queries and keys that RoPE pairs beside one another
    like_llama: bool = False  # whether the engines on torch run it, too
    mixture: bool = False  # whether its layers may have experts
    whole: Mapping[str, str] = field(default_factory=dict)  # as `names`, of tensors with all that follows the layer
    renamed: Mapping[str, str] = field(default_factory=dict)  # parts of names on the hub, and what they are here

    @property
    def parts(self) -> Mapping[str, str]:
        """The names of parts of a layer."""
        return PARTS if self.names is None else self.names


def windows_of(fields: ConfigFields, layers: int, window: int, full: Callable[[int], bool]) -> list[int]:
    """Return each layer's window; 0: none. `full`: whether a layer has none, where the fields do not list the kinds."""
    kinds = fields.values.get("layer_types") or [FULL if full(layer) else SLIDING for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not {*kinds} <= {SLIDING, FULL}:
        raise fields.wrong("layer_types", f"{SLIDING} or {FULL} for each of the {layers} layers")
    return [window if kind == SLIDING else 0 for kind in kinds]
