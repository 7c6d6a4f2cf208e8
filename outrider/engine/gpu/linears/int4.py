"""Linears whose weights have 4 bits, for decoding: a quarter of what bfloat16 has to read.

Groups of 32 inputs share a scale; a weight is its number times the scale, rounded to bfloat16. A byte has the numbers
of two inputs that are sixteen apart, so neither half has to be rearranged. Plans are those of `float8`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.gpu.linears.float8 import FEW_ROWS, QUANTIZED_AT_ONCE, Float8Plan, Tile, converted, finished
from outrider.engine.torch_layers.int4 import GROUP
from outrider.errors import ConfigError

LARGEST = 7  # number; the smallest is -7
ZERO = 8  # what is added to a number to store it
HALF = GROUP // 2
PADDED = (16, 32, 64)  # rows
# The largest that takes few registers, so that many programs of a processor have weights on their way. Not measured.
_TILE = Tile(64, 64, weights_first=False, num_warps=4, num_stages=4, programs=264)


class GroupedInt4Weight(NamedTuple):
    """The weights of a linear."""

    values: Tensor  # [outputs, inputs / 2] uint8: input i of a group in the low half, input i + 16 in the high one
    scales: Tensor  # [outputs, inputs / GROUP] bfloat16

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def exact(self) -> Tensor:
        """Return the weights: [outputs, inputs] bfloat16."""
        outputs, groups = self.scales.shape
        stored = self.values.view(outputs, groups, HALF)
        numbers = torch.cat((stored & 15, stored >> 4), 2).float() - ZERO
        return (numbers * self.scales.float()[:, :, None]).to(torch.bfloat16).view(outputs, groups * GROUP)


def quantized4(weight: Tensor) -> GroupedInt4Weight:
    """Return the weights of a linear, [outputs, inputs] bfloat16 or float32, in 4 bits.

    The largest number of each group becomes 7 or -7. Needs memory for a few outputs beside the result. Raises
    ConfigError.
    """
    outputs, inputs = weight.shape
    if inputs % GROUP:
        raise ConfigError(
            f"int4 weights: a linear of this model has {inputs} inputs, which must be a multiple of {GROUP}; use float8"
        )
    values = torch.empty(outputs, inputs // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(outputs, inputs // GROUP, dtype=torch.bfloat16, device=weight.device)
    step = max(1, QUANTIZED_AT_ONCE // inputs)
    for first in range(0, outputs, step):
        exact = weight[first : first + step].float().view(-1, inputs // GROUP, GROUP)
        scale = (exact.abs().amax(2) / LARGEST).to(torch.bfloat16)
        scale = torch.where(scale == 0.0, 1.0, scale)
        numbers = (exact / scale.float()[:, :, None]).round_().clamp_(-LARGEST, LARGEST) + ZERO
        stored = numbers.to(torch.uint8)
        scales[first : first + step] = scale
        values[first : first + step] = (stored[:, :, :HALF] | stored[:, :, HALF:] << 4).flatten(1)
    return GroupedInt4Weight(values, scales)


def linear4(x: Tensor, weight: GroupedInt4Weight, bias: Tensor | None = None, buffer: Tensor | None = None) -> Tensor:
    """Compute x times the weights plus the bias; see `float8.linear8`."""
    assert x.ndim == 2
    assert x.shape[1] == 2 * weight.values.shape[1]
    if x.device.type == "cpu":
        return reference(x, weight, bias)
    return by_kernels(x, weight, bias, buffer)


def reference(x: Tensor, weight: GroupedInt4Weight, bias: Tensor | None = None) -> Tensor:
    """Compute what `linear4` does with operations of torch alone, on any device."""
    result = x.float() @ weight.exact().float().t()
    if bias is not None:
        result += bias.float()
    return result.to(x.dtype)


def by_kernels(
    x: Tensor, weight: GroupedInt4Weight, bias: Tensor | None = None, buffer: Tensor | None = None
) -> Tensor:
    """Compute what `linear4` does on a GPU; tests interpret the kernels."""
    assert x.dtype == torch.bfloat16
    assert weight.values.is_contiguous()
    x = x.contiguous()
    rows, inputs = x.shape
    if rows > FEW_ROWS:

        def convert(part: slice, weights: Tensor) -> None:
            _unpack(GroupedInt4Weight(weight.values[part], weight.scales[part]), weights)

        return converted(x, len(weight.values), convert, None, bias, buffer)
    return planned(x, weight, bias, plan_of(rows, inputs, len(weight.values)))


def plan_of(rows: int, inputs: int, outputs: int) -> Float8Plan:
    """Choose the sizes for 1 to FEW_ROWS rows."""
    return Float8Plan.tiled(next(most for most in PADDED if rows <= most), inputs, outputs, _TILE)


def planned(x: Tensor, weight: GroupedInt4Weight, bias: Tensor | None, plan: Float8Plan) -> Tensor:
    """Compute `linear4` for a plan with room for the rows."""
    from outrider.engine.gpu.linears.int4_kernels import multiply4

    rows, inputs = x.shape
    outputs, split = len(weight.values), plan.splits > 1
    result = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    sums = torch.empty(plan.splits, rows, outputs, device=x.device) if split else result
    multiply4[(-(-outputs // plan.block_n), plan.splits)](
        x, weight.values, weight.scales, x if bias is None else bias, sums,
        rows, inputs, outputs, plan.part,
        **plan.constants, GROUP=GROUP, SPLIT=split, BIASED=bias is not None and not split,
        num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip
    if split:
        finished(sums, None, bias, result)
    return result


def _unpack(weight: GroupedInt4Weight, weights: Tensor) -> None:
    """Write the weights, [outputs, inputs] bfloat16."""
    from outrider.engine.gpu.linears.int4_kernels import UNPACKED, unpack4

    outputs, inputs = weights.shape
    unpack4[(outputs, -(-inputs // (2 * UNPACKED)))](
        weight.values, weight.scales, weights, inputs, GROUP=GROUP, BLOCK=UNPACKED, num_warps=4
    )
