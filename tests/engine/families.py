"""Small random checkpoints of many families of `transformers`, some of which cannot verify trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    SmolLM3Config,
)

WINDOW = 8  # of those that have one: much shorter than the texts
CONTEXT = 128
BASE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GPT2: dict[str, Any] = {
    "vocab_size": 131,
    "n_positions": CONTEXT,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
CHUNKS: dict[str, Any] = {"head_dim": 16, "num_local_experts": 2, "attention_chunk_size": WINDOW}
JAMBA: dict[str, Any] = {"num_experts": 2, "mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1}
MIXED = ["sliding_attention", "sliding_attention", "full_attention"]
LINEAR: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MAMBA: dict[str, Any] = {"vocab_size": 131, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 3}

Shape = tuple[type[PreTrainedConfig], dict[str, Any]]
TREES: dict[str, Shape] = {
    "llama": (LlamaConfig, BASE),
    "mistral-window": (MistralConfig, BASE | {"sliding_window": WINDOW}),
    "gemma2": (Gemma2Config, BASE | {"head_dim": 16, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0}),
    "gemma3": (Gemma3TextConfig, BASE | {"head_dim": 16, "sliding_window": WINDOW, "layer_types": MIXED}),
    "gpt-oss": (GptOssConfig, BASE | EXPERTS | {"head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 4}),
    "llama4-chunks": (Llama4TextConfig, BASE | CHUNKS),
    "qwen2-moe": (Qwen2MoeConfig, BASE | EXPERTS),
    "gpt2": (GPT2Config, GPT2),
    "gpt-j": (GPTJConfig, GPT2 | {"rotary_dim": 8}),
    "neox": (GPTNeoXConfig, BASE | {"num_key_value_heads": 4}),
    "phi": (PhiConfig, BASE | {"partial_rotary_factor": 0.5}),
    "opt": (OPTConfig, BASE | {"ffn_dim": 96, "word_embed_proj_dim": 64, "pad_token_id": 1}),
    "falcon": (FalconConfig, BASE),
}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
LONG: dict[str, Any] = {
    "original_max_position_embeddings": CONTEXT // 2,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.3, 1.5],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": CONTEXT // 2,
    },
}
COMPILED: dict[str, Shape] = {  # beside some of TREES
    "llama-linear": (
        LlamaConfig,
        BASE | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "granite": (GraniteConfig, BASE | GRANITE),
    "smollm3": (SmolLM3Config, BASE | {"num_hidden_layers": 5}),
    "olmo2": (Olmo2Config, BASE),
    "olmo3": (Olmo3Config, BASE | {"sliding_window": WINDOW, "layer_types": MIXED}),
    "phi3": (Phi3Config, BASE | {"sliding_window": WINDOW}),
    "phi3-long": (Phi3Config, BASE | LONG),
    "qwen3-moe": (Qwen3MoeConfig, BASE | EXPERTS | {"head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "mixtral": (MixtralConfig, BASE | {"num_local_experts": 4, "sliding_window": None}),
    "olmoe": (OlmoeConfig, BASE | EXPERTS),
}
HYBRIDS: dict[str, Shape] = {
    "qwen3-next": (Qwen3NextConfig, BASE | EXPERTS | LINEAR),
    "qwen3-5": (Qwen3_5TextConfig, BASE | LINEAR),
    "qwen3-5-moe": (Qwen3_5MoeTextConfig, BASE | EXPERTS | LINEAR),
}
PLAIN: dict[str, Shape] = {
    "mamba": (MambaConfig, MAMBA),
    "jamba": (JambaConfig, BASE | JAMBA),
    "recurrent-gemma": (RecurrentGemmaConfig, BASE | {"lru_width": 64, "attention_window_size": 16}),
    "bloom": (BloomConfig, {"vocab_size": 131, "hidden_size": 64, "n_layer": 3, "n_head": 4}),
}


def make_family(folder: Path, name: str, **changes: Any) -> Path:
    """A random float32 checkpoint; the logits' deviation is about one."""
    kind, shape = (TREES | COMPILED | HYBRIDS | PLAIN)[name]
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(kind(**shape | changes))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "A_log" not in parameter_name:  # a recurrence must decay
                parameter.normal_(0.0, 0.15)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return folder
