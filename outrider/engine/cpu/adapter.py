"""Packs a low-rank adapter for the compiled engine. It needs no model, so one can be packed while passes run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from outrider.engine.adapters.low_rank import DOWN, GATE_UP, OUTPUT, QKV, LowRankAdapter, LowRankUpdate
from outrider.engine.checkpoints.checkpoint import ModelConfig

if TYPE_CHECKING:
    from outrider._native import Adapter

_PARTS = (QKV, OUTPUT, GATE_UP, DOWN)  # the weights that a linear of the engine joins, by the engine's number of it


def pack_adapter(adapter: LowRankAdapter, config: ModelConfig, kept: Sequence[int], dtype: str) -> Adapter:
    """Return the adapter for an engine that has the `kept` layers of a model, in float32 or bfloat16."""
    from outrider._native import Adapter

    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    packed = Adapter(dtype, config.width, queries, keys, config.ffn, len(kept))
    outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    for index, layer in enumerate(kept):
        updates = adapter.layers.get(layer, {})
        for part, modules in enumerate(_PARTS):
            if updates.keys().isdisjoint(modules):
                continue
            a, blocks = _joined(updates, modules, outputs, config.ffn)
            if modules == GATE_UP:
                packed.set(index, part, a, *blocks)
            else:
                packed.set(index, part, a, np.concatenate(blocks), None)
    return packed


def _joined(
    updates: Mapping[str, LowRankUpdate], modules: Sequence[str], outputs: Mapping[str, int], ffn: int
) -> tuple[NDArray[np.float32], list[NDArray[np.float32]]]:
    """Return A of the weights that a linear joins, [all their ranks, inputs], and for each weight its B, [outputs, all
    their ranks], which is zero for the ranks of the others."""
    present = [updates[name] for name in modules if name in updates]
    ranks = sum(len(it.a) for it in present)
    blocks, first = [], 0
    for name in modules:
        update = updates.get(name)
        rows = len(update.b) if update is not None else outputs.get(name, ffn)
        block = np.zeros((rows, ranks), np.float32)
        if update is not None:
            block[:, first : first + len(update.a)] = update.b
            first += len(update.a)
        blocks.append(block)
    return np.concatenate([it.a for it in present]), blocks
