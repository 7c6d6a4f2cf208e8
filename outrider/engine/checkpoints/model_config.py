"""The sizes of models, whatever format their checkpoints have."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from outrider.engine.checkpoints.rope import Rope

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
# Bounds far above all models; a damaged configuration may exceed them.
MOST, MOST_CONTEXT, MOST_LAYERS = 1 << 28, 1 << 24, 1 << 16
DRAFT_IDS = "outrider_draft_ids"  # Outrider's key for `ModelConfig.draft_ids`
UNBOUNDED = 8192  # tokens of context of a model whose configuration names none


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes of a model of the Llama family."""

    model_type: str
    vocabulary: int
    width: int  # of the residual stream
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # units of the feed-forward
    context: int  # longest text, in tokens
    eps: float  # of the RMS norms
    rope: Rope
    tied: bool  # whether the head is the embedding
    qkv_bias: bool
    output_bias: bool  # on the attention's output projection
    ffn_bias: bool
    head_norms: bool  # whether an RMS norm is over each head's query and key
    eos_ids: tuple[int, ...]
    unpadded_vocabulary: int  # ids from this one on are padding, which only makes the head as wide as a larger model's
    draft_ids: tuple[int, ...] = ()  # ascending: the ids of the head's rows, where a drafter has a part of them alone

    @property
    def head_rows(self) -> int:
        """Ids that the head has logits of; all others are never likeliest."""
        return len(self.draft_ids) or self.vocabulary

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    def to_json(self) -> dict[str, Any]:
        """Return it as the config.json of a checkpoint in Hugging Face format has it."""
        rope = {"rope_type": "default", "rope_theta": self.rope.theta}
        if (scaling := self.rope.scaling) is not None:
            rope |= asdict(scaling) | {"rope_type": "llama3"}
            rope["original_max_position_embeddings"] = rope.pop("original_context")
        biased = self.qkv_bias and self.model_type != "qwen2"  # models of qwen2 all have them
        reduced = {DRAFT_IDS: [*self.draft_ids]} if self.draft_ids else {}
        return reduced | {
            "architectures": [f"{self.model_type.capitalize()}ForCausalLM"],
            "model_type": self.model_type,
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.eps,
            "rope_parameters": rope,
            "tie_word_embeddings": self.tied,
            "attention_bias": biased,
            "mlp_bias": self.ffn_bias,
            "eos_token_id": [*self.eos_ids],
        }


@dataclass(frozen=True, slots=True)
class Outline:
    """The sizes of a causal model of any family, for callers that do not load it."""

    model_type: str
    vocabulary: int
    context: int  # longest text, in tokens


def check_draft_ids(ids: object, vocabulary: int, *, tied: bool) -> tuple[int, ...]:
    """Return the ids of a reduced head, as a configuration has them. Raises ValueError that says what is allowed."""
    if not isinstance(ids, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise ValueError("a list of token ids")
    if not ids or any(one >= other for one, other in pairwise(ids)) or ids[0] < 0 or ids[-1] >= vocabulary:
        raise ValueError(f"token ids below {vocabulary}, ascending")
    if tied:
        raise ValueError("absent where the head is the embedding")
    return tuple(ids)
