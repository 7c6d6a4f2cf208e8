"""The part of each weight that one rank of a tensor-parallel group holds (Megatron-LM, arXiv 1909.08053, section 3).

Attention is split by heads and the feed-forward by units: the first projection by its outputs, the second by its
inputs, so that a layer needs two sums over the ranks. The embedding is split by channels and the head by tokens; the
parts of both are joined. A low-rank adapter B A is split as the weight that it changes: B by the weight's outputs, or A
by its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from outrider.engine.adapters.low_rank import GATE_UP, LowRankAdapter, LowRankUpdate
from outrider.engine.checkpoints.checkpoint import ModelConfig
from outrider.errors import ConfigError


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

    def config(self, config: ModelConfig) -> ModelConfig:
        """Return the shape of its part. Raises ConfigError when the ranks cannot share the model."""
        counts = {"attention heads": config.heads, "channels": config.width, "feed-forward units": config.ffn}
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
        )

    def adapter(self, adapter: LowRankAdapter, config: ModelConfig) -> LowRankAdapter:
        """Return what an adapter adds to its part. `config`: that of the complete model."""
        if self.of == 1:
            return adapter
        layers = {
            layer: {module: self._update(update, module, config) for module, update in updates.items()}
            for layer, updates in adapter.layers.items()
        }
        return replace(adapter, layers=layers)

    def _update(self, update: LowRankUpdate, module: str, config: ModelConfig) -> LowRankUpdate:
        queries, units, heads = self.part(config.heads, config.head_dim), self.part(config.ffn), self.kv_heads(config)
        if module in ("o_proj", "down_proj"):
            inputs = queries if module == "o_proj" else units
            return update._replace(a=np.ascontiguousarray(update.a[:, inputs]))
        keys = slice(heads.start * config.head_dim, heads.stop * config.head_dim)
        outputs = queries if module == "q_proj" else units if module in GATE_UP else keys
        return update._replace(b=update.b[outputs])


def degrees(config: ModelConfig) -> list[int]:
    """Return the numbers of ranks that can share a model."""
    return [
        count
        for count in range(1, config.heads + 1)
        if not any(size % count for size in (config.heads, config.width, config.ffn))
        and (config.kv_heads % count == 0 or count % config.kv_heads == 0)
    ]
