"""The part of each weight that one rank of a tensor-parallel group holds (Megatron-LM, arXiv 1909.08053, section 3).

Attention is split by heads and the feed-forward by units: the first projection by its outputs, the second by its
inputs, so that a layer needs two sums over the ranks. The embedding is split by channels and the head by tokens; the
parts of both are joined. A low-rank adapter B A is split as the weight that it changes: B by the weight's outputs, or A
by its inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from outrider.engine.adapters.low_rank import LowRankAdapter, LowRankUpdate
from outrider.engine.checkpoints.checkpoint import ModelConfig
from outrider.engine.checkpoints.model_config import DeltaRule, LayerParts
from outrider.engine.checkpoints.stored_tensors import ALL
from outrider.errors import ConfigError


class WeightPart(NamedTuple):
    """A tensor of a checkpoint, and the part of it that a rank holds."""

    name: str
    shape: tuple[int, ...]  # of the complete tensor
    rows: slice = ALL
    columns: slice = ALL


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` of `of` ranks."""

    rank: int = 0
    of: int = 1

    def part(self, count: int, unit: int = 1) -> slice:
        """Return the rows of its share of `count` equal units, of `unit` rows each; `count` is a multiple of `of`."""
        each = count // self.of * unit
        return slice(self.rank * each, (self.rank + 1) * each)

    def kv_heads(self, config: ModelConfig) -> slice:
        """Return the KV heads of its query heads. Where there are fewer KV heads than ranks, ranks share them."""
        if config.kv_heads >= self.of:
            return self.part(config.kv_heads)
        head = self.rank * config.kv_heads // self.of
        return slice(head, head + 1)

    def tokens(self, vocabulary: int) -> slice:
        """Return the ids whose logits it computes. The last rank may have fewer than the others."""
        each = -(-vocabulary // self.of)
        return slice(min(self.rank * each, vocabulary), min((self.rank + 1) * each, vocabulary))

    def layer(self, it: ModelConfig, index: int) -> dict[str, WeightPart]:
        """Return the tensors of a layer that the model and this rank have, by what they are.

        Norms: attention_norm, ffn_norm, query_norm, key_norm, and behind the parts attention_post_norm and
        ffn_post_norm; linears: query, key, value, output, gate, up, down; and the biases of these, as query_bias. One
        that is added behind a sum over ranks is on rank 0 alone. Of a mixture: router, and where an expert is shared,
        shared_gate, and gate, up and down of that one.
        """
        prefix = f"model.layers.{index}"
        attention, ffn, heads = f"{prefix}.self_attn", f"{prefix}.mlp", self.kv_heads(it)
        queries, keys = it.heads * it.head_dim, it.kv_heads * it.head_dim
        projected = 2 if it.parts.gated else 1  # for each number of a query head
        own_projected = self.part(it.heads, projected * it.head_dim)
        own_queries = self.part(it.heads, it.head_dim)
        own_keys = slice(heads.start * it.head_dim, heads.stop * it.head_dim)
        found = {what: WeightPart(f"{prefix}.{name}.weight", (it.width,)) for what, name in _norms(it.parts).items()}
        delta = it.parts.delta if it.parts.delta is not None and it.parts.delta.layers[index] else None
        if delta is not None:
            found |= _delta_tensors(f"{prefix}.linear_attn", delta, it.width)
        elif it.head_norms:
            whole = it.parts.whole_norms
            found["query_norm"] = WeightPart(f"{attention}.q_norm.weight", (queries if whole else it.head_dim,))
            found["key_norm"] = WeightPart(f"{attention}.k_norm.weight", (keys if whole else it.head_dim,))
        experts = it.parts.experts if it.parts.experts is not None and it.parts.experts.layers[index] else None
        units = it.ffn
        if experts is not None:
            found["router"] = WeightPart(f"{ffn}.gate.weight", (experts.count, it.width))
            if units := experts.shared:
                found["shared_gate"] = WeightPart(f"{ffn}.shared_expert_gate.weight", (1, it.width))
            ffn = f"{ffn}.shared_expert"
        own_units = self.part(units)
        for what, name, outputs, part, biased in (
            ("query", f"{attention}.q_proj", projected * queries, own_projected, it.qkv_bias),
            ("key", f"{attention}.k_proj", keys, own_keys, it.qkv_bias),
            ("value", f"{attention}.v_proj", keys, own_keys, it.qkv_bias),
            ("gate", f"{ffn}.gate_proj", units, own_units, it.ffn_bias),
            ("up", f"{ffn}.up_proj", units, own_units, it.ffn_bias),
        ):
            if not outputs or (delta is not None and what in ("query", "key", "value")):
                continue
            found[what] = WeightPart(f"{name}.weight", (outputs, it.width), part)
            if biased:
                found[f"{what}_bias"] = WeightPart(f"{name}.bias", (outputs,), part)
        if it.parts.joined:
            _join(found, f"{attention}.qkv_proj.weight", ("query", "key", "value"))
            _join(found, f"{ffn}.gate_up_proj.weight", ("gate", "up"))
        for what, name, inputs, part, biased in (
            ("output", f"{attention}.o_proj", queries, own_queries, it.output_bias),
            ("down", f"{ffn}.down_proj", units, own_units, it.ffn_bias),
        ):
            if not inputs or (delta is not None and what == "output"):
                continue
            found[what] = WeightPart(f"{name}.weight", (it.width, inputs), columns=part)
            if biased and not self.rank:
                found[f"{what}_bias"] = WeightPart(f"{name}.bias", (it.width,))
        return found

    def experts(self, it: ModelConfig, index: int) -> Iterator[tuple[WeightPart, WeightPart, WeightPart]]:
        """Yield gate, up and down of each expert of a layer: this rank's units of them. Dense layers have none."""
        experts = it.parts.experts
        if experts is None or not experts.layers[index]:
            return
        units = self.part(experts.ffn)
        for number in range(experts.count):
            prefix = f"model.layers.{index}.mlp.experts.{number}"
            yield (
                WeightPart(f"{prefix}.gate_proj.weight", (experts.ffn, it.width), units),
                WeightPart(f"{prefix}.up_proj.weight", (experts.ffn, it.width), units),
                WeightPart(f"{prefix}.down_proj.weight", (it.width, experts.ffn), columns=units),
            )

    def ends(self, it: ModelConfig) -> dict[str, WeightPart]:
        """Return the tensors beside the layers: embedding, norm (the last one) and head, which may be the embedding."""
        embedding, head = "model.embed_tokens.weight", (it.head_rows, it.width)
        return {
            "embedding": WeightPart(embedding, (it.vocabulary, it.width), columns=self.part(it.width)),
            "norm": WeightPart("model.norm.weight", (it.width,)),
            "head": WeightPart(embedding if it.tied else "lm_head.weight", head, self.tokens(it.head_rows)),
        }

    def config(self, config: ModelConfig) -> ModelConfig:
        """Return the shape of its part. Raises ConfigError when the ranks cannot share the model."""
        if config.draft_ids and self.of > 1:
            raise ConfigError(
                "tensor_parallel: must be 1 for a drafter with a reduced vocabulary, which one rank holds"
            )
        if config.parts.delta is not None and self.of > 1:
            raise ConfigError(
                f"tensor_parallel: must be 1 for {config.model_type}, whose states of the gated delta rule one rank has"
            )
        if config.parts.whole_norms and self.of > 1:
            raise ConfigError(
                f"tensor_parallel: must be 1 for {config.model_type}, whose norms are over all of a layer's heads"
            )
        counts = {"attention heads": config.heads, "channels": config.width, "feed-forward units": config.ffn}
        experts = config.parts.experts
        if experts is not None:
            counts["units of an expert"] = experts.ffn
            counts["units of the shared expert"] = experts.shared
        for what, count in counts.items():
            if count % self.of:
                raise ConfigError(
                    f"tensor_parallel: {self.of} ranks cannot share the {count} {what} of this model; "
                    f"possible are {', '.join(map(str, degrees(config)))}"
                )
        if config.kv_heads % self.of and self.of % config.kv_heads:
            raise ConfigError(
                f"tensor_parallel: {self.of} ranks can neither share nor repeat the {config.kv_heads} KV heads of this "
                f"model; possible are {', '.join(map(str, degrees(config)))}"
            )
        kv_heads = self.kv_heads(config)
        return replace(
            config,
            heads=config.heads // self.of,
            kv_heads=kv_heads.stop - kv_heads.start,
            ffn=config.ffn // self.of,
            parts=config.parts
            if experts is None
            else replace(
                config.parts,
                experts=replace(experts, ffn=experts.ffn // self.of, shared=experts.shared // self.of),
            ),
        )

    def adapter(self, adapter: LowRankAdapter, config: ModelConfig) -> LowRankAdapter:
        """Return what an adapter adds to its part. `config`: that of the complete model."""
        if self.of == 1:
            return adapter
        parts = {it.name.split(".")[-2]: it for it in self.layer(config, 0).values() if it.name.endswith(".weight")}

        def own(update: LowRankUpdate, part: WeightPart) -> LowRankUpdate:
            return LowRankUpdate(np.ascontiguousarray(update.a[:, part.columns]), update.b[part.rows])

        layers = {
            layer: {module: own(update, parts[module]) for module, update in updates.items()}
            for layer, updates in adapter.layers.items()
        }
        return replace(adapter, layers=layers)


def _delta_tensors(prefix: str, it: DeltaRule, width: int) -> dict[str, WeightPart]:
    """Return the tensors of the gated delta rule in a layer. Joined, `inputs` has the gates and `beta` the decay."""
    heads, joined = it.value_heads, it.joined
    projections = {
        "inputs": ("qkvz" if joined else "qkv", it.channels + (it.values if joined else 0)),
        "beta": ("ba" if joined else "b", heads * (2 if joined else 1)),
    } | ({} if joined else {"gates": ("z", it.values), "decay": ("a", heads)})
    found = {
        what: WeightPart(f"{prefix}.in_proj_{name}.weight", (outputs, width))
        for what, (name, outputs) in projections.items()
    }
    return found | {
        "convolution": WeightPart(f"{prefix}.conv1d.weight", (it.channels, 1, it.taps)),
        "decay_rates": WeightPart(f"{prefix}.A_log", (heads,)),
        "decay_biases": WeightPart(f"{prefix}.dt_bias", (heads,)),
        "state_norm": WeightPart(f"{prefix}.norm.weight", (it.value_dim,)),
        "output": WeightPart(f"{prefix}.out_proj.weight", (width, it.values)),
    }


def _norms(it: LayerParts) -> dict[str, str]:
    """Return the names on the hub of the norms of the residual stream and of what is added to it."""
    if not it.post_norms:
        return {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    behind = {"attention_post_norm": "post_attention_layernorm", "ffn_post_norm": "post_feedforward_layernorm"}
    before = {"attention_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
    return behind | (before if it.pre_norms else {})


def _join(found: dict[str, WeightPart], name: str, whats: Sequence[str]) -> None:
    """Have weights be parts of one tensor, one behind the other."""
    outputs = [found[what].shape[0] for what in whats]
    for what, first in zip(whats, itertools.accumulate(outputs, initial=0), strict=False):
        rows = found[what].rows
        start, stop, _ = rows.indices(found[what].shape[0])
        found[what] = WeightPart(name, (sum(outputs), *found[what].shape[1:]), slice(first + start, first + stop))


def tensor_shapes(config: ModelConfig, layers: Iterable[int]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a model with these layers of a checkpoint, by name."""
    whole = Shard()
    parts = [part for index in layers for part in whole.layer(config, index).values()]
    parts += [part for index in layers for expert in whole.experts(config, index) for part in expert]
    return {part.name: part.shape for part in (*parts, *whole.ends(config).values())}


def degrees(config: ModelConfig) -> list[int]:
    """Return the numbers of ranks that can share a model."""
    return [
        count
        for count in range(1, config.heads + 1)
        if not any(size % count for size in (config.heads, config.width, config.ffn))
        and (config.kv_heads % count == 0 or count % config.kv_heads == 0)
    ]
