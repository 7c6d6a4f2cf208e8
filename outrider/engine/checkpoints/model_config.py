"""The sizes of models, whatever format their checkpoints have."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.engine.checkpoints.rope import Rope

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
# Bounds far above all models; a damaged configuration may exceed them.
MOST, MOST_CONTEXT, MOST_LAYERS = 1 << 28, 1 << 24, 1 << 16
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

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Outline:
    """The sizes of a causal model of any family, for callers that do not load it."""

    model_type: str
    vocabulary: int
    context: int  # longest text, in tokens
