"""The sizes of models, whatever format their checkpoints have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from outrider.engine.checkpoints.rope import LinearScaling, Llama3Scaling, Rope

# Bounds far above all models; a damaged configuration may exceed them.
MOST, MOST_CONTEXT, MOST_LAYERS = 1 << 28, 1 << 24, 1 << 16
DRAFT_IDS = "outrider_draft_ids"  # Outrider's key for `ModelConfig.draft_ids`
UNBOUNDED = 8192  # tokens of context of a model whose configuration names none


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How a layer attends."""

    window: int  # how many tokens it reaches back, its own among them; 0: all
    rope: Rope | None  # None: it turns nothing


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixtures of experts in the place of feed-forwards (arXiv 1701.06538)."""

    count: int
    used: int  # by each token: those that the layer's router scores highest
    ffn: int  # units of each
    even: bool  # whether the shares of a token's experts add up to 1
    layers: tuple[bool, ...]  # whether each layer has one
    shared: int = 0  # units of an expert that each token has beside these, by a gate of its own; 0: there is none


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """The gated delta rule in the place of attention (arXiv 2412.06464): a state of fixed size for each head."""

    key_heads: int
    value_heads: int  # a multiple of them
    key_dim: int
    value_dim: int
    taps: int  # tokens that the convolution before it sees, the last its own
    joined: bool  # whether a tensor has each key head's queries, keys, values and gates side by side
    logged: bool  # whether the rates of decay are stored as the logarithms of their absolute values
    tiled: (
        bool  # whether the value heads of a key head are `key_heads` apart, as in GGUF files; else they are neighbours
    )
    layers: tuple[bool, ...]  # whether each layer has it

    @property
    def keys(self) -> int:
        """Numbers of a token's keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers of a token's values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: those of queries, keys and values."""
        return 2 * self.keys + self.values


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What the layers of a model have beside its sizes. The defaults are Llama's."""

    activation: Literal["silu", "gelu_tanh"] = "silu"  # of the feed-forward's gate
    pre_norms: bool = True  # whether RMS norms are before attention and feed-forward
    post_norms: bool = False  # and behind them
    norm_offset: float = 0.0  # what is added to the stored weights of norms
    whole_norms: bool = False  # whether `head_norms` are over the queries of all heads together, and over their keys
    joined: bool = False  # whether one tensor has queries, keys and values, and another one gates and ups
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and feed-forward add
    query_scale: float = 0.0  # of the products of queries and keys; 0: one over the root of `head_dim`
    logit_scale: float = 1.0
    score_cap: float = 0.0  # bounds the products of queries and keys by a tanh; 0: they have no bound
    logit_cap: float = 0.0  # and the logits
    turned: int = 0  # dimensions of a head that RoPE turns; 0: all
    attention: tuple[LayerAttention, ...] = ()  # of each layer; (): all tokens, turned by the model's `rope`
    gated: bool = False  # whether each query head has a gate of its output beside it
    experts: Experts | None = None  # None: all layers are dense
    delta: DeltaRule | None = None  # None: all layers attend


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes of a model, and what its layers have."""

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
    parts: LayerParts = LayerParts()

    @property
    def head_rows(self) -> int:
        """Ids that the head has logits of; all others are never likeliest."""
        return len(self.draft_ids) or self.vocabulary

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def like_llama(self) -> bool:
        """Whether its layers have Llama's parts alone, which is what engines on torch run."""
        return self.parts == LayerParts()

    @property
    def query_scale(self) -> float:
        """What the products of queries and keys are multiplied by."""
        return self.parts.query_scale or self.head_dim**-0.5

    @property
    def turned(self) -> int:
        """Dimensions of a head that RoPE turns."""
        return self.parts.turned or self.head_dim

    @property
    def attention(self) -> tuple[LayerAttention, ...]:
        """How each layer attends."""
        return self.parts.attention or (LayerAttention(0, self.rope),) * self.layers

    def within_windows(self) -> ModelConfig:
        """Return the configuration of engines without windows: up to the shortest, a text is as without them."""
        windows = [it.window for it in self.parts.attention if it.window]
        if not windows or any(it.rope != self.rope for it in self.parts.attention):
            return self
        return replace(self, context=min(self.context, *windows), parts=replace(self.parts, attention=()))

    def with_layers(self, kept: Sequence[int]) -> ModelConfig:
        """Return the configuration of some of the layers."""
        attention, experts, delta = self.parts.attention, self.parts.experts, self.parts.delta
        if attention:
            attention = tuple(attention[layer] for layer in kept)
        if experts is not None:
            experts = replace(experts, layers=tuple(experts.layers[layer] for layer in kept))
        if delta is not None:
            delta = replace(delta, layers=tuple(delta.layers[layer] for layer in kept))
        parts = replace(self.parts, attention=attention, experts=experts, delta=delta)
        return replace(self, layers=len(kept), parts=parts)

    def to_json(self) -> dict[str, Any]:
        """Return it as the config.json of a checkpoint in Hugging Face format has it."""
        rope = {"rope_type": "default", "rope_theta": self.rope.theta}
        if isinstance(scaling := self.rope.scaling, LinearScaling):
            rope |= {"rope_type": "linear", "factor": scaling.factor}
        elif isinstance(scaling, Llama3Scaling):
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
