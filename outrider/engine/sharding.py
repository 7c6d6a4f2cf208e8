"""What one rank of a tensor-parallel group holds of each weight (Megatron-LM, arXiv 1909.08053, section 3).

Attention by heads and the feed-forward by units: the first projection by its outputs, the second by its inputs, so
that a layer needs two sums over the ranks. The embedding by channels and the head by tokens: both are joined.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.engine.checkpoint import ModelConfig
from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` among `of`."""

    rank: int = 0
    of: int = 1

    def part(self, count: int, unit: int = 1) -> slice:
        """Its share of `count` equal things of `unit` rows each; `count` is a multiple of `of`."""
        each = count // self.of * unit
        return slice(self.rank * each, (self.rank + 1) * each)

    def kv_heads(self, config: ModelConfig) -> slice:
        """The KV heads that its query heads share. Where there are fewer than ranks, several ranks have the same."""
        if config.kv_heads >= self.of:
            return self.part(config.kv_heads)
        head = self.rank * config.kv_heads // self.of
        return slice(head, head + 1)

    def tokens(self, vocabulary: int) -> slice:
        """The ids whose logits it computes. The last rank may have fewer than the others."""
        each = -(-vocabulary // self.of)
        return slice(min(self.rank * each, vocabulary), min((self.rank + 1) * each, vocabulary))

    def config(self, config: ModelConfig) -> ModelConfig:
        """The shape of its part. Raises ConfigError when the model cannot be divided by that many."""
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


def degrees(config: ModelConfig) -> list[int]:
    """How many ranks can share a model."""
    return [
        count
        for count in range(1, config.heads + 1)
        if not any(size % count for size in (config.heads, config.width, config.ffn))
        and (config.kv_heads % count == 0 or count % config.kv_heads == 0)
    ]
