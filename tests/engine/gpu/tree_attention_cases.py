"""Passes for tree attention, and the comparison with its definition in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.gpu.attention.page_table import PAGE_ROWS, pages_of
from outrider.engine.gpu.attention.tree_attention import (
    TILE_COLUMNS,
    TREE_WORDS,
    AttentionBuffers,
    AttentionPlan,
    lay_tiles,
    segment_attention,
    tree_attention,
)
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.masks import tree_mask
from tests.engine.gpu.taped import gathered_attention

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MARK = 7.0  # in rows that no tile has


@dataclass(frozen=True, slots=True)
class Chain:
    """A causal segment without a mask."""

    prefix: int
    rows: int


@dataclass(frozen=True, slots=True)
class Branches:
    """A random tree behind a chain, as a verifier has it."""

    prefix: int
    rows: int


@dataclass(frozen=True, slots=True)
class Scattered:
    """The last rows of a longer span, each of which sees some of the rows before it, as a drafter has it."""

    prefix: int
    rows: int
    span: int
    density: float = 0.3  # of the rows before it, beside the row itself


Part = Chain | Branches | Scattered


@dataclass(frozen=True, slots=True)
class Case:
    """A pass. `rows`: with padding; `splits`: in place of the plan's."""

    parts: tuple[Part, ...]
    rows: int
    group: int = 1
    kv_heads: int = 1
    dim: int = 16
    dtype: str = "float32"
    splits: int | None = None
    seed: int = 0
    by: Literal["kernels", "segments", "gathering"] = "kernels"  # others are operations of torch


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a pass compares with its definition."""

    error: float  # the largest difference
    untouched: bool  # whether rows of padding have what was there before
    repeated: bool  # whether a second run gives the same bits
    splits: int
    tiles: int
    capacity: int


def compare(case: Case, device: str) -> Outcome:
    """Run a pass with the kernels and without."""
    random = np.random.default_rng(case.seed)
    heads, dtype = case.kv_heads * case.group, DTYPES[case.dtype]
    slots = len(case.parts) + 1
    places = random.permutation(slots)[: len(case.parts)].tolist()
    segments = [segment(part, slot, random) for part, slot in zip(case.parts, places, strict=True)]
    held = PAGE_ROWS * pages_of(max(it.prefix + it.span for it in segments) + 70)
    plan = AttentionPlan.of(
        case.rows,
        heads=heads,
        kv_heads=case.kv_heads,
        dim=case.dim,
        dtype=dtype,
        segments=slots,
        text_pages=pages_of(held),
    )
    plan = plan if case.splits is None else replace(plan, splits=case.splits)
    queries = _normal(random, (case.rows, heads, case.dim))
    cache = _normal(random, (2, slots, case.kv_heads, held, case.dim))
    _spoil(cache, segments, random)
    queries, cache = queries.to(dtype), cache.to(dtype)
    held_pages, pages = paged(cache, segments, plan, random)
    tiles = np.full((plan.capacity, TILE_COLUMNS), 12345, np.int32)
    trees = np.full((case.rows, TREE_WORDS), -1, np.int32)  # bits beyond a mask are not read
    count = lay_tiles(segments, plan.tile_rows, tiles, trees)
    buffers = AttentionBuffers.of([plan], torch.device(device))
    for unread in (buffers.accumulators, buffers.peaks, buffers.totals):
        unread.fill_(torch.nan)
    laid = map(torch.from_numpy, (tiles, trees, pages))
    inputs = [it.to(device) for it in (queries, *held_pages, *laid)]
    results = []
    ways = {"kernels": tree_attention, "segments": segment_attention, "gathering": gathered_attention}
    for _ in range(2 if device == "cuda" else 1):
        buffers.result.fill_(MARK)
        results.append(ways[case.by](*inputs, plan=plan, buffers=buffers).cpu().clone())
    expected = reference(queries, cache[0], cache[1], segments, case.group)
    used = len(expected)
    return Outcome(
        error=float((results[0][:used].double() - expected).abs().max()),
        untouched=bool((results[0][used:] == MARK).all()),
        repeated=torch.equal(results[0], results[-1]),
        splits=plan.splits,
        tiles=count,
        capacity=plan.capacity,
    )


def paged(
    cache: Tensor, segments: Sequence[Segment], plan: AttentionPlan, random: np.random.Generator
) -> tuple[Tensor, NDArray[np.int32]]:
    """Put a cache [2, slots, kv_heads, held, dim] into pages in any order, whose rows are not contiguous.

    Returns the pages, and the list of those of each segment's text; no entry behind them is one.
    """
    _, slots, kv_heads, held, dim = cache.shape
    each = pages_of(held)
    table = random.permutation(slots * each).reshape(slots, each)
    pages = cache.new_empty((2, slots * each, PAGE_ROWS, kv_heads, dim)).transpose(2, 3)
    pages[:, table] = cache.view(2, slots, kv_heads, each, PAGE_ROWS, dim).transpose(2, 3)
    listed = np.zeros(plan.segments * plan.text_pages, np.int32)
    texts = np.concatenate([table[it.slot, : pages_of(it.prefix + it.span)] for it in segments])
    listed[: len(texts)] = texts
    return pages, listed


def reference(queries: Tensor, keys: Tensor, values: Tensor, segments: Sequence[Segment], group: int) -> Tensor:
    """Compute attention as it is defined, in float64: [rows without padding, heads, dim]."""
    results, first = [], 0
    for it in segments:
        count, end = len(it.tokens), it.prefix + it.span
        seen = torch.ones(count, end, dtype=torch.bool)
        seen[:, it.prefix :] = torch.from_numpy(it.seen)
        key, value = (kept[it.slot, :, :end].double().repeat_interleave(group, 0) for kept in (keys, values))
        scores = queries[first : first + count].double().transpose(0, 1) @ key.transpose(1, 2)
        weights = (scores * queries.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        results.append((weights @ value).transpose(0, 1))
        first += count
    return torch.cat(results)


def segment(part: Part, slot: int, random: np.random.Generator) -> Segment:
    """Make the rows of a part; their tokens do not matter."""
    mask: NDArray[np.bool_] | None = None
    if isinstance(part, Branches):
        chain = int(random.integers(1, part.rows + 1))
        mask = tree_mask(chain, [int(random.integers(0, row)) for row in range(chain, part.rows)])
    if isinstance(part, Scattered):
        mask = np.tri(part.rows, part.span, part.span - part.rows, dtype=np.bool_)
        mask &= random.random(mask.shape) < part.density
        mask |= np.eye(part.rows, part.span, part.span - part.rows, dtype=np.bool_)
    return Segment(slot, part.prefix, np.zeros(part.rows, np.int64), np.arange(part.rows), mask)


def _normal(random: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(random.standard_normal(shape, np.float32))


def _spoil(cache: Tensor, segments: Sequence[Segment], random: np.random.Generator) -> None:
    """Write to rows that nobody sees: 1e30 inside of spans, which is stale, and NaN behind all segments."""
    free = set(range(cache.shape[1])) - {it.slot for it in segments}
    cache[:, list(free)] = torch.nan
    for it in segments:
        end = it.prefix + it.span
        cache[:, it.slot, :, end:] = torch.nan
        stale = it.prefix + np.flatnonzero(~it.seen.any(0))
        cache[:, it.slot, :, torch.from_numpy(stale)] = 1e30


def only_padding(splits: int, device: str) -> bool:
    """Return whether a pass without a tile leaves the result as it was."""
    plan = AttentionPlan.of(4, heads=2, kv_heads=1, dim=16, dtype=torch.float32, segments=2, text_pages=1)
    plan = replace(plan, splits=splits)
    tiles = torch.zeros(plan.capacity, TILE_COLUMNS, dtype=torch.int32, device=device)
    trees = torch.zeros(plan.rows, TREE_WORDS, dtype=torch.int32, device=device)
    pages = torch.zeros(2, dtype=torch.int32, device=device)
    keys = torch.full((2, 1, PAGE_ROWS, 16), torch.nan, device=device)
    queries = torch.ones(4, 2, 16, device=device)
    buffers = AttentionBuffers.of([plan], torch.device(device))
    return not tree_attention(queries, keys, keys, tiles, trees, pages, plan=plan, buffers=buffers).any()
