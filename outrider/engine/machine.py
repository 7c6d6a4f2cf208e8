"""Whether this machine's libraries keep what invariant numerics rest on. Tried when an engine loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.batch import Segment
from outrider.engine.checkpoint import ModelConfig
from outrider.engine.invariant import BLOCK, KEY_TILE, InvariantAttention, invariant_silu
from outrider.engine.model import Model
from outrider.engine.packing import Run
from outrider.errors import ConfigError

ROWS = (2, 3, 5, 17, 40)  # of a linear; the last holds the others
PREFIX = BLOCK - 8
NODES = 24  # of two paths that part at the root: one has every third node, the other reaches into the next block


def check_machine(model: Model, config: ModelConfig) -> None:
    """Raises ConfigError, naming the operation, when a row's bits depend on what is computed beside it."""
    for name, holds in _trials(model, config):
        if not holds:
            raise ConfigError(
                f"numerics: invariant is not possible here: on this machine the bits of {name} depend on what is "
                "computed beside them; use fast"
            )


def _trials(model: Model, config: ModelConfig) -> Iterator[tuple[str, bool]]:
    random = torch.Generator().manual_seed(1)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=random)

    layer = model.layers[0]
    wide, deep = draw(ROWS[-1], config.width), draw(ROWS[-1], config.heads * config.head_dim)
    units = draw(ROWS[-1], config.ffn)
    yield "the query, key and value projection", _row_by_row(layer.qkv, wide)
    yield "the attention's output projection", _row_by_row(layer.output, deep)
    yield "the feed-forward's first projection", _row_by_row(layer.gate_up, wide)
    yield "the feed-forward's second projection", _row_by_row(layer.down, units)
    yield "the head", _row_by_row(model.head, wide)
    yield "a norm", _row_by_row(layer.attention_norm, wide)
    flat = draw(1000).to(layer.gate_up.dtype)
    cuts = (slice(0, 1), slice(5, 36), slice(100, 231), slice(7, 1000))
    activated = invariant_silu(flat)
    yield "the activation", all(torch.equal(invariant_silu(flat[cut].clone()), activated[cut]) for cut in cuts)
    yield "attention", _attention_by_path(config, draw)


def _row_by_row(operation: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    whole = operation(x)
    return all(torch.equal(operation(x[:rows].clone()), whole[:rows]) for rows in ROWS)


def _attention_by_path(config: ModelConfig, draw: Callable[..., Tensor]) -> bool:
    """Whether the last node of a path attends alike among the nodes of another path and behind its own alone."""
    attention = InvariantAttention(config.heads, config.kv_heads, config.head_dim)
    cache = draw(2, 1, config.kv_heads, PREFIX + NODES + KEY_TILE, config.head_dim)  # keys, values
    queries = draw(NODES, config.heads * config.head_dim)
    first = np.arange(NODES) % 3 != 0
    mask = np.tri(NODES, dtype=np.bool_) & (first[:, None] == first[None, :])

    def attend(cache: Tensor, queries: Tensor, mask: NDArray[np.bool_]) -> Tensor:
        run = _run(mask)
        return attention.prepare(run)(queries, *cache[..., : run.keys, :])

    together = attend(cache, queries, mask)
    for path in (np.flatnonzero(first), np.flatnonzero(~first)):
        own = cache.clone()
        own[..., PREFIX : PREFIX + len(path), :] = cache[..., PREFIX + path, :]
        alone = attend(own, queries[path[-1:]], np.ones((1, len(path)), np.bool_))
        if not torch.equal(alone[0], together[path[-1]]):
            return False
    return True


def _run(mask: NDArray[np.bool_]) -> Run:
    count, span = mask.shape
    zeros = np.zeros(count, np.int64)
    keys = -(-(PREFIX + span) // KEY_TILE) * KEY_TILE
    return Run(0, 1, keys, count, 0, (Segment(0, PREFIX, zeros, zeros, mask),))
