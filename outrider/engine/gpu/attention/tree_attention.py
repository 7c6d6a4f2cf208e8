"""Tree attention over all rows of a pass, whatever sessions they belong to and however long those sessions are.

A *tile* is a few consecutive rows of one segment. The host lays out the tiles and the bits of the trees for each pass
(`lay_tiles`); a kernel's program reads its tile on the device and takes as many keys as that tile sees. Shapes and
grids, and so a recorded graph, depend on the pass's number of rows alone (`AttentionPlan`).

The kernels need Triton, and are imported when they are first used: with CUDA, or in Triton's interpreter.

Source: SpecInfer (Miao et al., arXiv 2305.09781), section 4.2: one mask over all branches of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import log2, sqrt
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.gpu.attention.page_table import PAGE_ROWS, pages_of
from outrider.engine.interface.batch import Segment
from outrider.engine.torch_layers.attention import attend_text

TREE_WORDS = 16  # of bits, for each row of a pass
TREE_COLUMNS = 32 * TREE_WORDS  # cache rows behind the prefix that a tree may have
TILE_COLUMNS = 6  # first row in the pass, rows (0: padding), first entry in `pages`, prefix, keys behind it, behind
TREE = -1  # in the column `behind`: each row sees what its bits say; else row i sees keys up to prefix + behind + i
PROGRAMS = 132  # of a pass that has one text: the processors of an H100; more would cost more than they gain
MAX_SPLITS = 32


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The sizes of the kernels for a number of rows: whatever a recording depends on."""

    rows: int
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    block_m: int  # queries of a program: rows of a tile times query heads of a KV head, with padding
    block_n: int  # keys of a block
    tile_rows: int
    capacity: int  # tiles, padding included
    segments: int  # maximum of a pass
    text_pages: int  # maximum of a segment's text
    splits: int  # programs that share the keys of a tile: a power of two
    num_warps: int
    num_stages: int

    @classmethod
    def of(
        cls, rows: int, *, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, segments: int, text_pages: int
    ) -> AttentionPlan:
        """Choose the sizes. `rows`: of the pass, with padding; `segments`: maximum of a pass with any number of rows.

        Raises ValueError for shapes and types that the kernels do not support.
        """
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"tree attention has no kernel for {dtype}")
        if rows < 1 or segments < 1 or kv_heads < 1 or heads % kv_heads or not 1 <= dim <= 256:
            raise ValueError(f"tree attention with {rows} rows, {heads} of {kv_heads} heads of size {dim}")
        group = heads // kv_heads
        folded = rows * group
        exact = dtype == torch.float32  # without tensor cores: small blocks, whose operands fit the registers
        wide = 16 if folded <= 512 or exact else 64
        block_m = max(wide, _power(group))
        tile_rows = block_m // group
        programs = -(-rows // tile_rows) * kv_heads
        splits = 1
        while splits < MAX_SPLITS and 2 * splits * programs <= PROGRAMS:
            splits *= 2
        block_n = 32 if exact or dim > 128 or (dim > 64 and block_m > 16) else 64
        return cls(
            rows=rows,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            dtype=dtype,
            block_m=block_m,
            block_n=block_n,
            tile_rows=tile_rows,
            capacity=min(rows, (rows + min(rows, segments) * (tile_rows - 1)) // tile_rows),
            segments=min(rows, segments),
            text_pages=text_pages,
            splits=splits,
            num_warps=8 if exact or block_m * dim > 64 * 128 else 4,
            # Without a pipeline ptxas does not put wide products one after another. Keys wait for the number of their
            # page: Triton gives each of the two loads half of the stages.
            num_stages=1 if block_m > 16 else 5 if not exact and dim <= 128 else 3,
        )

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def attend_constants(self) -> dict[str, Any]:
        """What the kernel `attend` is compiled for."""
        return {
            "GROUP": self.group,
            "DIM": self.dim,
            "DIM_BLOCK": max(16, _power(self.dim)),
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "COLUMNS": TILE_COLUMNS,
            "PAGE": PAGE_ROWS,
            "SPLIT": self.splits > 1,
            "PRECISION": "ieee",
        }

    @property
    def combine_constants(self) -> dict[str, Any]:
        """What the kernel `combine` is compiled for."""
        return {
            "DIM": self.dim,
            "DIM_BLOCK": max(16, _power(self.dim)),
            "TILE_ROWS": self.tile_rows,
            "COLUMNS": TILE_COLUMNS,
            "SPLITS": self.splits,
        }


@dataclass(frozen=True, slots=True)
class AttentionBuffers:
    """Memory that all layers, and passes of all sizes, use in turn. It never moves, so a recorded graph can use it."""

    result: Tensor  # [rows, heads, dim]; zeros at first: rows that belong to no tile stay finite
    accumulators: Tensor  # float32: sums of each row, head and split, `dim` numbers each
    peaks: Tensor  # float32: maximum of the scores of each row, head and split
    totals: Tensor  # float32: sum of their weights

    @classmethod
    def of(cls, plans: Sequence[AttentionPlan], device: torch.device) -> AttentionBuffers:
        """Allocate what the largest of the plans needs. They differ in their rows alone."""
        largest = max(plans, key=lambda plan: plan.rows)
        parts = max(plan.rows * plan.heads * plan.splits if plan.splits > 1 else 1 for plan in plans)
        return cls(
            torch.zeros(largest.rows, largest.heads, largest.dim, dtype=largest.dtype, device=device),
            torch.zeros(parts * largest.dim, device=device),
            torch.zeros(parts, device=device),
            torch.zeros(parts, device=device),
        )


def tree_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles: Tensor,
    trees: Tensor,
    pages: Tensor,
    *,
    plan: AttentionPlan,
    buffers: AttentionBuffers,
) -> Tensor:
    """Compute the attention of all rows of a pass: queries [rows, heads, dim] -> the same shape and type.

    `keys`, `values`: [pages, kv_heads, PAGE_ROWS, dim], views of the cache, which has the new rows already. `tiles`:
    [capacity, TILE_COLUMNS] int32, `trees`: [rows, words] int32, as `lay_tiles` wrote them; `pages`: int32, those of
    each segment's text behind one another. The last dimension of all is contiguous. The host reads none of them.

    The result is a view of `buffers`, which the next call overwrites. Rows that belong to no tile are not written.
    """
    from outrider.engine.gpu.attention.tree_attention_kernels import attend, combine

    assert queries.shape == (plan.rows, plan.heads, plan.dim)
    assert tiles.shape == (plan.capacity, TILE_COLUMNS)
    assert len(trees) == plan.rows
    assert keys.shape[2] == PAGE_ROWS
    assert PAGE_ROWS % plan.block_n == 0
    assert all(it.stride(-1) == 1 for it in (queries, keys, values, tiles, trees, pages))
    assert queries.dtype == keys.dtype == values.dtype == plan.dtype
    result = buffers.result[: plan.rows]
    attend[plan.capacity, plan.kv_heads, plan.splits](
        queries,
        keys,
        values,
        tiles,
        trees,
        pages,
        result,
        buffers.accumulators,
        buffers.peaks,
        buffers.totals,
        log2(np.e) / sqrt(plan.dim),
        *queries.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        trees.stride(0),
        **plan.attend_constants,
        KEY_ROW=keys.stride(2),
        VALUE_ROW=values.stride(2),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    if plan.splits > 1:
        combine[plan.capacity * plan.tile_rows, plan.heads](
            tiles,
            result,
            buffers.accumulators,
            buffers.peaks,
            buffers.totals,
            **plan.combine_constants,
            num_warps=4,
        )
    return result


def segment_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles: Tensor,
    trees: Tensor,
    pages: Tensor,
    *,
    plan: AttentionPlan,
    buffers: AttentionBuffers,
) -> Tensor:
    """Compute what `tree_attention` does on a CPU, one segment after another.

    The host reads the tiles, so that a recording cannot have this.
    """
    result = buffers.result[: plan.rows]
    for page, tiles_of_segment in groupby(tiles[tiles[:, 1] > 0].tolist(), key=itemgetter(2)):
        (first, _, _, prefix, _, behind), *_ = laid = [*tiles_of_segment]
        rows, span = slice(first, laid[-1][0] + laid[-1][1]), laid[-1][4]
        text = pages[page : page + pages_of(prefix + span)]
        key, value = (held[text].transpose(0, 1).flatten(1, 2)[:, : prefix + span] for held in (keys, values))
        seen = None
        if span > 1:  # else a single row, which sees all
            seen = torch.ones(rows.stop - rows.start, prefix + span, dtype=torch.bool)
            seen[:, prefix:] = _bits(trees[rows], span) if behind == TREE else seen[:, prefix:].tril()
        result[rows] = attend_text(queries[rows], key, value, seen)
    return result


def _bits(trees: Tensor, count: int) -> Tensor:
    """Return the first `count` bits of each row: [rows, count] bool."""
    found = np.unpackbits(trees.numpy().view(np.uint8), axis=1, count=count, bitorder="little")
    return torch.from_numpy(found.astype(np.bool_))


def lay_tiles(segments: Sequence[Segment], tile_rows: int, tiles: NDArray[np.int32], trees: NDArray[np.int32]) -> int:
    """Write the tiles of segments whose rows lie one behind another in the pass, as do the pages of their texts.

    Return how many tiles there are.

    `tiles`: [capacity, TILE_COLUMNS], all of which is written; `trees`: [rows, words], of which rows with a mask are
    written. Raises ValueError when a mask has more columns than `trees` has bits, or when the tiles are too many.
    """
    laid, masks, first, page = [], [], 0, 0
    for it in segments:
        count, causal = len(it.tokens), it.mask is None
        for within in range(0, count, tile_rows):
            size = min(tile_rows, count - within)
            visible, behind = (within + size, within) if causal else (it.span, TREE)
            laid.append((first + within, size, page, it.prefix, visible, behind))
        if it.mask is not None:
            masks.append((first, it.mask))
        first += count
        page += pages_of(it.prefix + it.span)
    if len(laid) > len(tiles) or first > len(trees):
        raise ValueError(f"{len(laid)} tiles of {first} rows, of at most {len(tiles)} and {len(trees)}")
    tiles[: len(laid)] = laid
    tiles[len(laid) :] = 0
    if masks:
        pack_masks(masks, trees)
    return len(laid)


def pack_masks(placed: Sequence[tuple[int, NDArray[np.bool_]]], trees: NDArray[np.int32]) -> None:
    """Write the bits of masks, each behind its first row: the lowest bit of a row's first word is column 0."""
    width = max(mask.shape[1] for _, mask in placed)
    if width > 32 * trees.shape[1]:
        raise ValueError(f"a mask of {width} columns, of at most {32 * trees.shape[1]}")
    words = -(-width // 32)
    low, high = placed[0][0], placed[-1][0] + len(placed[-1][1])
    bits = np.zeros((high - low, 32 * words), np.bool_)
    for first, mask in placed:
        bits[first - low : first - low + len(mask), : mask.shape[1]] = mask
    trees[low:high, :words] = np.packbits(bits, axis=1, bitorder="little").view("<i4")


def _power(count: int) -> int:
    """Return the smallest power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()
