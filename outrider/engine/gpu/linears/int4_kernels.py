"""The kernels of `int4.linear4`, in Triton: the product with a part of the inputs, and the conversion of all weights.

As in `float8_kernels` each weight is read once. A block of bytes has as many low halves as high ones, so each step has
two products, over the inputs of the one and of the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNPACKED = 1024  # bytes of a program of `unpack4`


@triton.jit
def weights_of(numbers: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return weights in bfloat16, from stored numbers 0 to 15 and scales."""
    return ((numbers.to(tl.float32) - 8.0) * scale).to(tl.bfloat16)


@triton.jit(do_not_specialize=["rows"])
def multiply4(
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
    GROUP: tl.constexpr,
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
    known = tl.minimum(output, outputs - 1).to(tl.int64)  # padding reads the last output
    byte = tl.arange(0, BLOCK_K // 2)
    group = byte // (GROUP // 2)
    column = group * GROUP + byte % (GROUP // 2)  # of the input in a byte's low half
    weight_block = values + known[:, None] * (inputs // 2) + begin // 2 + byte[None, :]
    scale_block = scales + known[:, None] * (inputs // GROUP) + begin // GROUP + group[None, :]
    x_block = x + row[:, None] * inputs + begin + column[None, :]
    total = tl.zeros([BLOCK_N, ROWS] if WEIGHTS_FIRST else [ROWS, BLOCK_N], tl.float32)
    for first in range(begin, stop, BLOCK_K):
        if MASKED:
            inside = (first + column < stop)[None, :]
            stored = tl.load(weight_block, mask=inside, other=0)
            scale = tl.load(scale_block, mask=inside, other=0.0).to(tl.float32)
            low = tl.load(x_block, mask=inside & present[:, None], other=0.0)
            high = tl.load(x_block + GROUP // 2, mask=inside & present[:, None], other=0.0)
        else:
            stored = tl.load(weight_block)
            scale = tl.load(scale_block).to(tl.float32)
            low = tl.load(x_block, mask=present[:, None], other=0.0)
            high = tl.load(x_block + GROUP // 2, mask=present[:, None], other=0.0)
        low_weight = weights_of(stored & 15, scale)
        high_weight = weights_of(stored >> 4, scale)
        if WEIGHTS_FIRST:
            total = tl.dot(low_weight, tl.trans(low), total)
            total = tl.dot(high_weight, tl.trans(high), total)
        else:
            total = tl.dot(low, tl.trans(low_weight), total)
            total = tl.dot(high, tl.trans(high_weight), total)
        weight_block += BLOCK_K // 2
        scale_block += BLOCK_K // GROUP
        x_block += BLOCK_K
    if WEIGHTS_FIRST:
        total = tl.trans(total)
    at = row.to(tl.int64)[:, None] * outputs + output[None, :]
    there = present[:, None] & (output < outputs)[None, :]
    if SPLIT:
        tl.store(result + split.to(tl.int64) * rows * outputs + at, total, mask=there)
    else:
        if BIASED:
            total += tl.load(bias + known).to(tl.float32)[None, :]
        tl.store(result + at, total.to(result.dtype.element_ty), mask=there)


@triton.jit
def unpack4(
    values: tl.tensor,
    scales: tl.tensor,
    weights: tl.tensor,
    inputs: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the weights in bfloat16. Grid: [outputs, inputs / 2 / BLOCK]."""
    output = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = byte < inputs // 2
    group = byte // (GROUP // 2)
    stored = tl.load(values + output * (inputs // 2) + byte, mask=inside, other=0)
    scale = tl.load(scales + output * (inputs // GROUP) + group, mask=inside, other=0.0).to(tl.float32)
    at = weights + output * inputs + group * GROUP + byte % (GROUP // 2)
    tl.store(at, weights_of(stored & 15, scale), mask=inside)
    tl.store(at + GROUP // 2, weights_of(stored >> 4, scale), mask=inside)
