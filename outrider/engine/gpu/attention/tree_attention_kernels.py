"""The two kernels of `tree_attention`, in Triton: attention over a part of a tile's keys, and the sum of the parts.

A program folds the query heads of one KV head and the rows of one tile into the M dimension of its products: query m
is head m % GROUP of row m // GROUP. What does not fill BLOCK_M is padding.

Sources: FlashAttention-2 (Dao, arXiv 2307.08691) for the softmax over blocks of keys, Flash-Decoding (Dao et al., 2023)
for the split of the keys among programs. The kernels use no atomics, so their results repeat bit by bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_blocks(
    accumulator: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    words: tl.tensor,
    pages: tl.tensor,
    row: tl.tensor,
    present: tl.tensor,
    begin: tl.tensor,
    stop: tl.tensor,
    prefix: tl.tensor,
    end: tl.tensor,
    behind: tl.tensor,
    scale: tl.tensor,
    key_page: tl.tensor,
    value_page: tl.tensor,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KEY_ROW: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take the keys [begin, stop), block by block, into the softmax of a tile.

    `accumulator`: [BLOCK_M, DIM_BLOCK], `peak` and `total`: [BLOCK_M], the state of the online softmax, in float32.
    `words`: pointers [BLOCK_M] to the bits of each query; `pages`: to the number of the text's first page. No block of
    keys is in two pages. Without MASKED all keys are below the prefix.
    """
    columns = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, DIM_BLOCK)
    inner = dims[None, :] < DIM
    key_offsets = columns[:, None] * KEY_ROW + dims[None, :]
    value_offsets = columns[:, None] * VALUE_ROW + dims[None, :]
    for start in range(begin, stop, BLOCK_N):
        at = start + columns
        page = tl.load(pages + start // PAGE).to(tl.int64)
        key_block = keys + page * key_page + start % PAGE * KEY_ROW + key_offsets
        value_block = values + page * value_page + start % PAGE * VALUE_ROW + value_offsets
        if MASKED:
            loaded = (at < end)[:, None] & inner
            key = tl.load(key_block, mask=loaded, other=0.0)
            value = tl.load(value_block, mask=loaded, other=0.0)
        elif DIM == DIM_BLOCK:
            key = tl.load(key_block)
            value = tl.load(value_block)
        else:
            key = tl.load(key_block, mask=inner, other=0.0)
            value = tl.load(value_block, mask=inner, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        if MASKED:
            offset = at - prefix
            in_tree = (offset >= 0) & (at < end)
            read = present[:, None] & (in_tree & (behind < 0))[None, :]
            word = tl.load(words[:, None] + (offset >> 5)[None, :], mask=read, other=0)
            bit = ((word >> (offset & 31)[None, :]) & 1) != 0
            causal = (offset[None, :] <= (behind + row)[:, None]) & (in_tree & (behind >= 0))[None, :]
            seen = (offset < 0)[None, :] | bit | causal
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that sees no key yet
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, 1)
        accumulator = tl.dot(weights.to(value.dtype), value, accumulator * shrink[:, None], input_precision=PRECISION)
        peak = new_peak
    return accumulator, peak, total


@triton.jit(do_not_specialize_on_alignment=["tiles", "trees", "pages"])
def attend(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tiles: tl.tensor,
    trees: tl.tensor,
    pages: tl.tensor,
    result: tl.tensor,
    accumulators: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    scale: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    key_page: tl.tensor,
    key_head: tl.tensor,
    value_page: tl.tensor,
    value_head: tl.tensor,
    tree_row: tl.tensor,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KEY_ROW: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Compute the attention of one tile, KV head and part of the keys. Grid: [capacity, kv_heads, splits].

    With SPLIT the sums go to `accumulators`, `peaks` and `totals`, else the quotient goes to `result`.
    """
    # Later tiles of a prompt see more keys: they begin first.
    tile = tiles + (tl.num_programs(0) - 1 - tl.program_id(0)) * COLUMNS
    count = tl.load(tile + 1)
    if count == 0:
        return
    first = tl.load(tile)
    pages += tl.load(tile + 2)
    prefix = tl.load(tile + 3)
    end = prefix + tl.load(tile + 4)
    behind = tl.load(tile + 5)
    head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)

    part = tl.cdiv(tl.cdiv(end, BLOCK_N), splits) * BLOCK_N
    begin = split * part
    stop = tl.minimum(begin + part, end)
    masked = tl.minimum(tl.maximum(prefix // BLOCK_N * BLOCK_N, begin), tl.maximum(stop, begin))

    folded = tl.arange(0, BLOCK_M)
    row = folded // GROUP
    present = row < count
    at_row = (first + row).to(tl.int64)
    at_head = head * GROUP + folded % GROUP
    dims = tl.arange(0, DIM_BLOCK)
    used = present[:, None] & (dims < DIM)[None, :]
    query = tl.load(
        queries + (at_row * query_row + at_head * query_head)[:, None] + dims[None, :], mask=used, other=0.0
    )
    keys += head * key_head
    values += head * value_head
    words = trees + at_row * tree_row

    accumulator = tl.zeros([BLOCK_M, DIM_BLOCK], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    accumulator, peak, total = attend_blocks(
        accumulator, peak, total, query, keys, values, words, pages, row, present,
        begin, masked, prefix, end, behind, scale, key_page, value_page,
        DIM, DIM_BLOCK, BLOCK_N, KEY_ROW, VALUE_ROW, PAGE, False, PRECISION,
    )  # fmt: skip
    accumulator, peak, total = attend_blocks(
        accumulator, peak, total, query, keys, values, words, pages, row, present,
        masked, stop, prefix, end, behind, scale, key_page, value_page,
        DIM, DIM_BLOCK, BLOCK_N, KEY_ROW, VALUE_ROW, PAGE, True, PRECISION,
    )  # fmt: skip

    at = at_row * (tl.num_programs(1) * GROUP) + at_head
    if SPLIT:
        at = at * splits + split
        tl.store(peaks + at, peak, mask=present)
        tl.store(totals + at, total, mask=present)
        # `combine` reads no sum of a part without keys.
        tl.store(accumulators + at[:, None] * DIM + dims[None, :], accumulator, mask=used & (begin < stop))
    else:
        attended = accumulator / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(result + at[:, None] * DIM + dims[None, :], attended.to(result.dtype.element_ty), mask=used)


@triton.jit(do_not_specialize_on_alignment=["tiles"])
def combine(
    tiles: tl.tensor,
    result: tl.tensor,
    accumulators: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Add the parts of one row and head. Grid: [capacity * TILE_ROWS, heads]; SPLITS is a power of two."""
    tile = tiles + tl.program_id(0) // TILE_ROWS * COLUMNS
    row = tl.program_id(0) % TILE_ROWS
    if row >= tl.load(tile + 1):
        return
    at = (tl.load(tile) + row).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    parts = at * SPLITS + tl.arange(0, SPLITS)
    dims = tl.arange(0, DIM_BLOCK)
    total = tl.load(totals + parts)
    peak = tl.load(peaks + parts)
    highest = tl.max(peak, 0)
    weights = tl.exp2(peak - tl.where(highest == float("-inf"), 0.0, highest))
    used = (total > 0.0)[:, None] & (dims < DIM)[None, :]
    accumulator = tl.load(accumulators + parts[:, None] * DIM + dims[None, :], mask=used, other=0.0)
    whole = tl.sum(weights * total, 0)
    attended = tl.sum(weights[:, None] * accumulator, 0) / tl.where(whole > 0.0, whole, 1.0)
    tl.store(result + at * DIM + dims, attended.to(result.dtype.element_ty), mask=dims < DIM)
