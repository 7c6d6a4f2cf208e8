"""Linears whose weights have 8 bits, for decoding: a pass of few rows takes the time that reading the weights takes.

Weights are float8 (e4m3) with one scale for each output, and are converted where they are used. Inputs, results and
biases keep their types. The kernels of `float8_kernels` need Triton, and are imported where a tensor is on a GPU.

Source: FP8 Formats for Deep Learning (Micikevicius et al., arXiv 2209.05433) for the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.errors import ConfigError

FEW_ROWS = 64  # up to this many rows a kernel reads the weights as they are; for more they are converted first
ALIGNMENT = 16  # bytes of one access to memory
LARGEST = 448.0  # number of e4m3
SMALLEST_SCALE = 2.0**-126  # normal in float32
QUANTIZED_AT_ONCE = 2**22  # numbers, as float32
MAX_SPLITS = 16
FINISHED = 512  # outputs of a program of the kernel `finish`


class Float8Weight(NamedTuple):
    """The weights of a linear: `values` times the scales of their outputs."""

    values: Tensor  # [outputs, inputs] float8_e4m3fn
    scales: Tensor  # [outputs] float32

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes


class Tile(NamedTuple):
    """What a program of the kernel computes, and how."""

    outputs: int
    inputs: int  # of one step of its loop
    weights_first: bool
    num_warps: int
    num_stages: int
    programs: int  # programs that keep the 132 processors of an H100 busy; with more rows sums of parts cost more


# Measured on an H100 for the linears of Llama-3.2-1B and 3.1-8B; those of 32 and 64 rows are not.
_SHALLOW = Tile(32, 256, weights_first=False, num_warps=4, num_stages=4, programs=128)
_SHALLOW_INPUTS = 4096  # up to this many a program takes all inputs of few outputs, so that no parts are added
_TILES = {
    16: Tile(64, 128, weights_first=False, num_warps=4, num_stages=4, programs=200),
    32: Tile(128, 128, weights_first=False, num_warps=4, num_stages=3, programs=256),
    64: Tile(128, 64, weights_first=False, num_warps=4, num_stages=4, programs=256),
}  # by rows, padded


@dataclass(frozen=True, slots=True)
class Float8Plan:
    """The sizes of the kernels for a shape. They are the same at each start, so sums have the same order."""

    rows: int  # padded
    block_n: int  # outputs of a program
    block_k: int  # inputs of one step of a program's loop
    part: int  # inputs of a program: a multiple of `block_k`
    splits: int  # programs that share the inputs of an output: a power of two
    masked: bool  # some steps have fewer inputs
    weights_first: bool  # the tensor cores' first operand is the weights, else the inputs
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, rows: int, inputs: int, outputs: int) -> Float8Plan:
        """Choose the sizes for 1 to FEW_ROWS rows. Raises ConfigError for inputs that the kernel cannot read."""
        check_inputs(inputs)
        if not 1 <= rows <= FEW_ROWS:
            raise ValueError(f"a float8 linear of {rows} rows, of at most {FEW_ROWS}")
        padded = next(most for most in _TILES if rows <= most)
        shallow = padded == min(_TILES) and _SHALLOW.inputs <= inputs <= _SHALLOW_INPUTS
        return cls.tiled(padded, inputs, outputs, _SHALLOW if shallow else _TILES[padded])

    @classmethod
    def tiled(cls, padded: int, inputs: int, outputs: int, tile: Tile) -> Float8Plan:
        """Return a plan with tiles of given sizes, and enough programs."""
        steps, splits = -(-inputs // tile.inputs), 1
        while splits < min(MAX_SPLITS, steps // 2) and -(-outputs // tile.outputs) * splits < tile.programs:
            splits *= 2
        return cls.sized(padded, inputs, tile.outputs, tile.inputs, splits, *tile[2:5])

    @classmethod
    def sized(
        cls,
        rows: int,
        inputs: int,
        block_n: int,
        block_k: int,
        splits: int,
        weights_first: bool,
        num_warps: int,
        num_stages: int,
    ) -> Float8Plan:
        """Return a plan of given sizes."""
        part = -(-inputs // (block_k * splits)) * block_k
        masked = inputs % block_k != 0
        return cls(rows, block_n, block_k, part, splits, masked, weights_first, num_warps, num_stages)

    @property
    def constants(self) -> dict[str, Any]:
        """What the first kernel is compiled for, beside its result."""
        return {
            "ROWS": self.rows,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "MASKED": self.masked,
            "WEIGHTS_FIRST": self.weights_first,
        }


def check_inputs(inputs: int) -> None:
    """Raise ConfigError for a linear whose rows of weights do not begin where an access to memory may."""
    if inputs % ALIGNMENT:
        raise ConfigError(
            f"float8 weights: a linear of this model has {inputs} inputs, which must be a multiple of {ALIGNMENT}; "
            "use bfloat16"
        )


def quantized(weight: Tensor) -> Float8Weight:
    """Return the weights of a linear, [outputs, inputs] bfloat16 or float32, as float8.

    The largest number of each output becomes 448, so a weight changes by at most 1/16 of itself, or 2^-10 of the scale,
    whichever is more. Needs memory for a few outputs beside the result. Raises ConfigError.
    """
    outputs, inputs = weight.shape
    check_inputs(inputs)
    values = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(outputs, dtype=torch.float32, device=weight.device)
    step = max(1, QUANTIZED_AT_ONCE // inputs)
    for first in range(0, outputs, step):
        exact = weight[first : first + step].float()
        largest = exact.abs().amax(1)
        scale = torch.where(largest == 0.0, 1.0, (largest / LARGEST).clamp_min(SMALLEST_SCALE))
        scales[first : first + step] = scale
        values[first : first + step] = (exact / scale[:, None]).clamp_(-LARGEST, LARGEST).to(values.dtype)
    return Float8Weight(values, scales)


def linear8(x: Tensor, weight: Float8Weight, bias: Tensor | None = None, buffer: Tensor | None = None) -> Tensor:
    """Compute x times the weights plus the bias: [rows, inputs] bfloat16 -> [rows, outputs] bfloat16.

    Products and sums are float32, the scale is applied to the sum, and the result is rounded once. `bias`: [outputs].
    `buffer`: bfloat16 numbers on the device, at least `inputs`, for the weights of more than FEW_ROWS rows; calls that
    run one after another can share one. A buffer that holds few outputs makes more launches. None: memory is allocated.

    A row's result depends on the shapes alone, not on other rows. It can be captured in a CUDA graph.
    """
    assert x.ndim == 2
    assert x.shape[1] == weight.values.shape[1]
    if x.device.type == "cpu":
        return reference(x, weight, bias)
    return by_kernels(x, weight, bias, buffer)


def reference(x: Tensor, weight: Float8Weight, bias: Tensor | None = None) -> Tensor:
    """Compute what `linear8` does with operations of torch alone, on any device. It converts all weights to float32."""
    result = x.float() @ weight.values.float().t() * weight.scales
    if bias is not None:
        result += bias.float()
    return result.to(x.dtype)


def by_kernels(x: Tensor, weight: Float8Weight, bias: Tensor | None = None, buffer: Tensor | None = None) -> Tensor:
    """Compute what `linear8` does on a GPU; tests interpret the kernels."""
    assert x.dtype == torch.bfloat16
    assert weight.values.is_contiguous()
    x = x.contiguous()
    rows, inputs = x.shape
    if rows > FEW_ROWS:

        def convert(part: slice, weights: Tensor) -> None:
            weights.copy_(weight.values[part])

        return converted(x, len(weight.values), convert, weight.scales, bias, buffer)
    return planned(x, weight, bias, Float8Plan.of(rows, inputs, len(weight.values)))


def planned(x: Tensor, weight: Float8Weight, bias: Tensor | None, plan: Float8Plan) -> Tensor:
    """Compute `linear8` for a plan with room for the rows."""
    from outrider.engine.gpu.linears.float8_kernels import multiply

    rows, inputs = x.shape
    outputs, split = len(weight.values), plan.splits > 1
    result = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    sums = torch.empty(plan.splits, rows, outputs, device=x.device) if split else result
    multiply[(-(-outputs // plan.block_n), plan.splits)](
        x, weight.values, weight.scales, weight.scales if bias is None else bias, sums,
        rows, inputs, outputs, plan.part,
        **plan.constants, SPLIT=split, BIASED=bias is not None and not split,
        num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip
    if split:
        finished(sums, weight.scales, bias, result)
    return result


def finished(sums: Tensor, scales: Tensor | None, bias: Tensor | None, result: Tensor) -> None:
    """Write the results, [rows, outputs] with contiguous rows, from the sums of their parts. `scales`: of outputs."""
    from outrider.engine.gpu.linears.float8_kernels import finish

    splits, rows, outputs = sums.shape
    finish[(-(-outputs // FINISHED), rows)](
        sums, sums if scales is None else scales, sums if bias is None else bias, result, rows, outputs,
        result.stride(0), SPLITS=splits, SCALED=scales is not None, BIASED=bias is not None, BLOCK=FINISHED,
        num_warps=4,
    )  # fmt: skip


def converted(
    x: Tensor,
    outputs: int,
    convert: Callable[[slice, Tensor], object],
    scales: Tensor | None,
    bias: Tensor | None,
    buffer: Tensor | None,
) -> Tensor:
    """Compute a linear for many rows: products of bfloat16, of as many outputs as the buffer holds.

    `convert`: writes the weights of some outputs, [outputs, inputs] bfloat16; `scales`: of outputs, applied to sums.
    """
    inputs = x.shape[1]
    if buffer is None:
        buffer = torch.empty(outputs * inputs, dtype=x.dtype, device=x.device)
    assert buffer.dtype == x.dtype
    step = min(outputs, buffer.numel() // inputs)
    assert step, f"a buffer of {buffer.numel()} numbers, of at least {inputs}"
    room = buffer.view(-1)[: step * inputs].view(step, inputs)
    result = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
    for first in range(0, outputs, step):
        part = slice(first, min(first + step, outputs))
        weights = room[: part.stop - first]
        convert(part, weights)
        scaled, biased = (None if it is None else it[part] for it in (scales, bias))
        finished(product(x, weights)[None], scaled, biased, result[:, part])
    return result


def product(x: Tensor, weights: Tensor) -> Tensor:
    """Return x times the weights, [rows, inputs] and [outputs, inputs] bfloat16, as float32."""
    return torch.mm(x, weights.t(), out_dtype=torch.float32)
