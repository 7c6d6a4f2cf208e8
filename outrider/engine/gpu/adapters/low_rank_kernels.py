"""The two kernels of `low_rank.add_low_rank`, in Triton: the product with A, and that with B, which is added.

A program has one tile: some rows that have the same adapter, wherever they are in the pass. It finds the adapter by its
address. There are no atomics, so results repeat bit by bit.

Source: SGMV of Punica (Chen et al., arXiv 2310.18547, section 4), with rows by their numbers as in S-LoRA's MBGMV
(Sheng et al., arXiv 2311.03285, section 5).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["entry", "rows"])
def shrink(
    x: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    sums: tl.tensor,
    entry: tl.tensor,
    rows: tl.tensor,
    inputs: tl.tensor,
    part: tl.tensor,
    COLUMNS: tl.constexpr,
    ENTRY: tl.constexpr,
    MOST_RANK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Compute the product of a tile with A of one module, over a part of the inputs. Grid: [tiles, modules, splits].

    The sums go to `sums`, [splits, rows, modules, MOST_RANK] float32, by the rows' places in `order`.
    """
    tile = tiles + tl.program_id(0) * COLUMNS
    count = tl.load(tile + 1)
    if count == 0:
        return
    module, split = tl.program_id(1), tl.program_id(2)
    table = tl.load(tile + 2).to(tl.pointer_type(tl.int64)) + (entry + module) * ENTRY
    rank = tl.load(table + 2).to(tl.int32)
    a = tl.multiple_of(tl.load(table).to(tl.pointer_type(x.dtype.element_ty)), 16)
    lane = tl.arange(0, TILE_ROWS)
    present = lane < count
    place = tl.load(tile) + lane
    row = tl.load(order + place, mask=present, other=0).to(tl.int64)
    column = tl.arange(0, BLOCK_K)
    begin = split * part
    stop = tl.minimum(begin + part, inputs)
    sums += ((split * rows + place) * tl.num_programs(1) + module)[:, None] * MOST_RANK
    for low in range(0, rank, BLOCK_R):
        number = low + tl.arange(0, BLOCK_R)
        used = number < rank
        total = tl.zeros([TILE_ROWS, BLOCK_R], tl.float32)
        for first in range(begin, stop, BLOCK_K):
            at = first + column
            inside = (at < stop)[None, :]
            given = tl.load(x + row[:, None] * inputs + at[None, :], mask=present[:, None] & inside, other=0.0)
            weight = tl.load(a + number[:, None] * inputs + at[None, :], mask=used[:, None] & inside, other=0.0)
            total = tl.dot(given, tl.trans(weight), total, input_precision="ieee")
        tl.store(sums + number[None, :], total, mask=present[:, None] & used[None, :])


@triton.jit(do_not_specialize=["entry", "rows"])
def expand(
    result: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    sums: tl.tensor,
    entry: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    first_outputs: tl.tensor,
    other_outputs: tl.tensor,
    COLUMNS: tl.constexpr,
    ENTRY: tl.constexpr,
    MOST_RANK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Add the product of a tile's sums with B of one module to BLOCK_N outputs. Grid: [tiles, blocks, modules].

    `result`: [rows, width], the modules' outputs side by side: `first_outputs`, then `other_outputs` for each other.
    """
    tile = tiles + tl.program_id(0) * COLUMNS
    count = tl.load(tile + 1)
    if count == 0:
        return
    module = tl.program_id(2)
    outputs = tl.where(module == 0, first_outputs, other_outputs)
    start = tl.where(module == 0, 0, first_outputs + (module - 1) * other_outputs)
    table = tl.load(tile + 2).to(tl.pointer_type(tl.int64)) + (entry + module) * ENTRY
    rank = tl.load(table + 2).to(tl.int32)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if (rank == 0) | (tl.program_id(1) * BLOCK_N >= outputs):
        return
    b = tl.multiple_of(tl.load(table + 1).to(tl.pointer_type(result.dtype.element_ty)), 16)
    lane = tl.arange(0, TILE_ROWS)
    present = lane < count
    place = tl.load(tile) + lane
    row = tl.load(order + place, mask=present, other=0).to(tl.int64)
    inside = column < outputs
    total = tl.zeros([TILE_ROWS, BLOCK_N], tl.float32)
    for low in range(0, rank, BLOCK_R):
        number = low + tl.arange(0, BLOCK_R)
        used = number < rank
        shrunk = tl.zeros([TILE_ROWS, BLOCK_R], tl.float32)
        for split in tl.static_range(SPLITS):
            at = ((split * rows + place) * tl.num_programs(2) + module)[:, None] * MOST_RANK + number[None, :]
            shrunk += tl.load(sums + at, mask=present[:, None] & used[None, :], other=0.0)
        weight = tl.load(
            b + number[:, None] * outputs + column[None, :], mask=used[:, None] & inside[None, :], other=0.0
        )
        total = tl.dot(shrunk.to(weight.dtype), weight, total, input_precision="ieee")
    there = present[:, None] & inside[None, :]
    target = result + row[:, None] * width + start + column[None, :]
    added = tl.load(target, mask=there, other=0.0).to(tl.float32) + total
    tl.store(target, added.to(result.dtype.element_ty), mask=there)
