"""Packs a low-rank adapter for the compiled engine. It needs no model, so one can be packed while passes run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.engine.adapters.low_rank import JOINED, LowRankAdapter
from outrider.engine.checkpoints.checkpoint import ModelConfig

if TYPE_CHECKING:
    from outrider._native import Adapter

_MOST = max(map(len, JOINED.values()))  # weights of a linear


def pack_adapter(adapter: LowRankAdapter, config: ModelConfig, kept: Sequence[int], dtype: str) -> Adapter:
    """Return the adapter for an engine that has the `kept` layers of a model, in float32 or bfloat16."""
    from outrider._native import Adapter

    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    packed = Adapter(dtype, config.width, queries, keys, config.ffn, len(kept))
    for index, layer in enumerate(kept):
        updates = adapter.layers.get(layer, {})
        for part, modules in enumerate(JOINED.values()):  # the engine has linears by number, in this order
            found = [updates.get(name, (None, None)) for name in modules]
            if updates.keys() & {*modules}:
                packed.set(index, part, *[it for pair in found for it in pair], *[None] * 2 * (_MOST - len(modules)))
    return packed
