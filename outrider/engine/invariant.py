"""Invariant numerics: a token's logits and KV are the same bits whatever the pass held beside it.

What that rests on, for prepacked linears, norms, rotations and the rest row by row: a row's bits do not depend on the
other rows, so long as there are two (`outrider.engine.linear`). Attention needs more, because a node's keys lie
where its tree left room, and no two passes read the same number of cache rows:

- Scores are one matrix product; an entry is a sum over the head's dimensions alone. Their maximum is exact.
- The weighted sum of the values goes by *blocks* of the path: entries 0 .. 127 of a query's own path, 128 .. 255 and
  so on, added up in that order. Within a block, a product of up to 192 rows adds one row after another, a fused
  multiply-add each. So rows with weight zero change nothing, wherever they lie: hidden keys, dead nodes, padding. The
  order of the cache rows alone matters, and along a path rows ascend.
- A block of committed rows is a slice of the cache. The last block of a path may begin in committed rows and go on
  among the nodes of a tree: it is a product over all of those rows. Where paths of one tree reach into different
  blocks, each block has its own product, with weight zero for the rows of the others.

These properties are the matrix library's (Intel MKL here), not IEEE's. `check_machine` tries them, and an engine that
cannot keep the promise does not load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad, silu

from outrider.engine.attention import Attend, fold_mask, length_class, score_mask
from outrider.engine.batch import Segment
from outrider.engine.packing import Run

BLOCK = 128  # entries of a path whose weighted values are summed one after another
MOST_ROWS = 192  # in one product; beyond them the library splits the sum
KEY_TILE = 32  # vector instructions fit it, so no entry falls into a loop's remainder
LEAST_QUERIES = 4  # fewer are computed by other kernels
LEAST_DIM = 16  # of values; narrower products are computed by other kernels
NATIVE_BELOW = 400  # torch multiplies smaller matrices itself: queries * keys * dim


@dataclass(frozen=True, slots=True)
class Tile:
    """One product of weights and values: a block of some queries' paths, or a part that has no rows of other blocks."""

    queries: slice  # of a slot's folded queries
    rows: slice | Tensor  # cache rows
    share: Tensor | None  # [slots * kv_heads, queries, rows] 1 where a row is of the block, else 0; None: all are


class InvariantAttention:
    """Attention in which every query sums over its own path, block by block, in the order of positions."""

    key_tile = KEY_TILE

    def __init__(self, heads: int, kv_heads: int, head_dim: int) -> None:
        self._kv_heads = kv_heads
        self._group = heads // kv_heads
        self._dim = head_dim
        self._scale = head_dim**-0.5
        self._least = max(LEAST_QUERIES, -(-NATIVE_BELOW // (KEY_TILE * head_dim)))
        self._ones = torch.ones(1, MOST_ROWS, LEAST_DIM)

    def kind(self, segment: Segment) -> tuple[int, ...]:
        """Trees share a run when their last whole block of committed rows is the same."""
        paths = _Paths.of(segment)
        if paths.whole == segment.prefix + segment.span:
            return (*length_class(segment), -1)
        block = paths.whole // BLOCK
        fits = segment.prefix + segment.span + KEY_TILE - block * BLOCK <= MOST_ROWS
        return (*length_class(segment), block) if fits else (*length_class(segment), block, segment.slot)

    def prepare(self, run: Run) -> Attend:
        used = run.width * self._group
        queries = max(used, self._least)
        count = run.slots * self._kv_heads
        mask = self._spread(pad(fold_mask(score_mask(run), self._group), (0, 0, 0, queries - used)))
        tiles = [self._tile(tile, queries) for tile in _tiles(run)]

        def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            folded = query.view(run.slots, used, self._kv_heads, self._dim).transpose(1, 2)
            if queries > used:
                folded = pad(folded, (0, 0, 0, queries - used))
            keys, values = keys.flatten(0, 1), values.flatten(0, 1)
            if self._dim < LEAST_DIM:
                values = pad(values, (0, LEAST_DIM - self._dim))
            weights = torch.baddbmm(mask, folded.flatten(0, 1), keys.transpose(1, 2), alpha=self._scale)
            weights.sub_(weights.amax(-1, keepdim=True)).exp_()
            sums = weights.new_zeros(count, queries, values.shape[-1])
            totals = weights.new_zeros(count, queries, LEAST_DIM)
            for tile in tiles:
                part, rows = weights[:, tile.queries], values
                if isinstance(tile.rows, slice):
                    part, rows = part[:, :, tile.rows], rows[:, tile.rows]
                else:
                    part, rows = part.index_select(2, tile.rows), rows.index_select(1, tile.rows)
                if tile.share is not None:
                    part = part * tile.share
                ones = self._ones[:, : rows.shape[1]].expand(count, -1, -1)
                sums[:, tile.queries].baddbmm_(part, rows)
                totals[:, tile.queries].baddbmm_(part, ones)
            result = sums[:, :used, : self._dim].div_(totals[:, :used, :1])
            return result.view(run.slots, self._kv_heads, used, self._dim).transpose(1, 2).reshape(query.shape)

        return attend

    def _spread(self, folded: Tensor) -> Tensor:
        """[slots, 1, queries, rows], for each KV head: [slots * kv_heads, queries, rows]; no copy for one slot."""
        spread = folded.expand(-1, self._kv_heads, -1, -1)
        return spread[0] if len(spread) == 1 else spread.flatten(0, 1)

    def _tile(self, tile: _Tile, queries: int) -> Tile:
        """The tile over folded queries, of which there are `queries`."""
        group = self._group
        rows = tile.rows if isinstance(tile.rows, slice) else torch.from_numpy(tile.rows)
        if tile.share is None:
            return Tile(slice(0, queries), rows, None)
        share = fold_mask(tile.share.astype(np.float32), group)
        start, count = tile.start * group, share.shape[2]
        # Those that are too few take neighbours along, with no share.
        first = max(0, min(start, queries - self._least))
        stop = max(start + count, first + self._least)
        return Tile(slice(first, stop), rows, self._spread(pad(share, (0, 0, start - first, stop - start - count))))


def invariant_silu(x: Tensor) -> Tensor:
    """`x / (1 + exp(-x))`. In float32 torch's own differs between a vector and the remainder of a loop; `exp` does not.

    In bfloat16 the two agree for every value.
    """
    if x.dtype == torch.bfloat16:
        return silu(x)
    return x.div(x.neg().exp_().add_(1.0))


@dataclass(frozen=True, slots=True)
class _Tile:
    """A tile before its queries are folded."""

    start: int  # its first query
    rows: slice | NDArray[np.int64]
    share: NDArray[np.bool_] | None  # [slots, queries, rows]


@dataclass(frozen=True, slots=True)
class _Paths:
    """Which entry of each query's path the rows of a segment are."""

    whole: int  # cache rows [0, whole) are the entries 0 .. whole - 1 of the paths that they are on; the others later
    entries: NDArray[np.int64]  # [n, m]: of the rows behind the prefix; -1 where a query does not see the row

    @classmethod
    def of(cls, segment: Segment) -> _Paths:
        count, span = len(segment.tokens), segment.span
        seen = np.tri(count, dtype=np.bool_) if segment.mask is None else segment.mask
        ranks = seen.cumsum(1) - 1
        moved = ranks[seen & (ranks != np.arange(span))]
        trunk = int(moved.min()) if len(moved) else span
        return cls(segment.prefix + trunk, np.where(seen, segment.prefix + ranks, -1))


def _tiles(run: Run) -> Iterator[_Tile]:
    """The products that a run needs, in the order in which they are added up."""
    paths = [_Paths.of(segment) for segment in run.segments]
    ends = [segment.prefix + segment.span for segment in run.segments]
    chains = all(path.whole == end for path, end in zip(paths, ends, strict=True))
    tail = run.keys if chains else min(path.whole for path in paths) // BLOCK * BLOCK
    for start in range(0, tail, BLOCK):
        yield _Tile(0, slice(start, min(start + BLOCK, tail)), None)
    if tail == run.keys:
        return
    blocks = _blocks(run, paths, tail)
    first, last = tail // BLOCK, int(blocks.max())
    for block in range(first, last + 1):
        share = blocks == block
        if run.keys - tail > MOST_ROWS:
            yield from _gathered(share[0], tail)
        else:
            yield _Tile(0, slice(tail, run.keys), share if last > first else None)


def _blocks(run: Run, paths: Sequence[_Paths], tail: int) -> NDArray[np.int64]:
    """The block that each row from `tail` on is of, on each query's path: [slots, width, rows], -1 for none."""
    blocks = np.full((run.slots, run.width, run.keys - tail), -1, np.int64)
    if tail == 0:
        blocks[:, :, 0] = 0  # the one key of padding
    for segment, path in zip(run.segments, paths, strict=True):
        start, end = max(segment.prefix, tail), segment.prefix + segment.span
        mine = blocks[segment.slot - run.slot, : len(segment.tokens)]
        mine[:, : start - tail] = np.arange(tail, start) // BLOCK
        mine[:, start - tail : end - tail] = path.entries[:, start - segment.prefix :] // BLOCK  # -1 stays -1
    return blocks


def _gathered(share: NDArray[np.bool_], tail: int) -> Iterator[_Tile]:
    """A block of one slot's paths whose rows, [queries, rows] from `tail` on, are too many or too far apart.

    Neighbouring queries go together while their rows are few enough. No query has more than a block of them.
    """
    start = 0
    while start < len(share):
        stop, rows = start + 1, share[start]
        while stop < len(share) and (more := rows | share[stop]).sum() <= MOST_ROWS:
            stop, rows = stop + 1, more
        if rows.any():
            others = np.flatnonzero(~rows)[: -int(rows.sum()) % KEY_TILE]
            chosen = np.sort(np.concatenate([np.flatnonzero(rows), others]))
            yield _Tile(start, tail + chosen, share[None, start:stop, chosen])
        start = stop
