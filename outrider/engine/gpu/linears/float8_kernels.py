"""The kernels of `float8.linear8`, in Triton: the product with a part of the inputs, and the sum of the parts, which
`int4.linear4` uses, too.

The first reads each weight once, and reads ahead of the tensor cores. Where outputs are few, programs share the inputs
of an output; the second kernel adds their sums in a fixed order. There are no atomics, so results repeat bit by bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def multiply(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    result: tl.tensor,
    rows: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    part: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    SPLIT: tl.constexpr,
    BIASED: tl.constexpr,
) -> None:
    """Compute BLOCK_N outputs of all rows. Grid: [outputs / BLOCK_N, splits].

    With SPLIT the sums over a program's inputs go to `result`, [splits, rows, outputs] float32, else the results do.
    """
    split = tl.program_id(1)
    begin = split * part
    stop = tl.minimum(begin + part, inputs)
    row = tl.arange(0, ROWS)
    present = row < rows
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    known = tl.minimum(output, outputs - 1)  # padding reads the last output
    column = tl.arange(0, BLOCK_K)
    weight_block = values + known.to(tl.int64)[:, None] * inputs + begin + column[None, :]
    x_block = x + row[:, None] * inputs + begin + column[None, :]
    total = tl.zeros([BLOCK_N, ROWS] if WEIGHTS_FIRST else [ROWS, BLOCK_N], tl.float32)
    for first in range(begin, stop, BLOCK_K):
        if MASKED:
            inside = (first + column < stop)[None, :]
            stored = tl.load(weight_block, mask=inside, other=0.0)
            given = tl.load(x_block, mask=inside & present[:, None], other=0.0)
        else:
            stored = tl.load(weight_block)
            given = tl.load(x_block, mask=present[:, None], other=0.0)
        # Exact. Through float32 it compiles to packed conversions; the direct way takes an F2F for each weight.
        weight = stored.to(tl.float16).to(tl.float32).to(tl.bfloat16)
        total = tl.dot(weight, tl.trans(given), total) if WEIGHTS_FIRST else tl.dot(given, tl.trans(weight), total)
        weight_block += BLOCK_K
        x_block += BLOCK_K
    if WEIGHTS_FIRST:
        total = tl.trans(total)
    at = row.to(tl.int64)[:, None] * outputs + output[None, :]
    there = present[:, None] & (output < outputs)[None, :]
    if SPLIT:
        tl.store(result + split.to(tl.int64) * rows * outputs + at, total, mask=there)
    else:
        total *= tl.load(scales + known)[None, :]
        if BIASED:
            total += tl.load(bias + known).to(tl.float32)[None, :]
        tl.store(result + at, total.to(result.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows"])
def finish(
    sums: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    result: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    result_row: tl.tensor,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add the sums [SPLITS, rows, outputs] of the parts, and finish the results. Grid: [outputs / BLOCK, rows]."""
    row = tl.program_id(1).to(tl.int64)
    output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = output < outputs
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(sums + (split * rows + row) * outputs + output, mask=inside, other=0.0)
    if SCALED:
        total *= tl.load(scales + output, mask=inside, other=0.0)
    if BIASED:
        total += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + row * result_row + output, total.to(result.dtype.element_ty), mask=inside)
