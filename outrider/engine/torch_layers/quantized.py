"""Linear layers in 8 and 4 bits, quantized while a checkpoint loads, without training or calibration data.

int8: one scale for each output channel, and one for each row of inputs, computed from that row (vector-wise
quantization: LLM.int8(), arXiv 2208.07339, section 3.1). Products of 8-bit integers are summed exactly, so a row's
result has the same bits in all passes.

int4: a scale and an offset for each group of 32 inputs of an output channel (ZeroQuant, arXiv 2206.01861, section 4.1),
and inputs in bfloat16.

Both round to the nearest step. `python -m bench --suite passes` measures their cost and gain on a machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from outrider.engine.torch_layers.int4 import GROUP, check_int4
from outrider.engine.torch_layers.linear import Linear
from outrider.errors import ConfigError

INT8_MOST = 127  # codes are -127 .. 127, symmetric
INT8_ZERO = 128  # code of an input of zero; the fast kernels need unsigned inputs
INT4_ZERO = 8  # code of a group's offset; codes are 0 .. 15
PIECE = 256  # output channels quantized at a time, which bounds the memory in float32
LEAST = 1e-30  # replaces the scale of a row of zeros

_COLUMNS = 256  # inputs of the exactness check


class Int8Weight(NamedTuple):
    """An int8 weight: weight[o, i] is about codes[o, i] * scales[o], within half a scale."""

    codes: Tensor  # [out, in] int8
    scales: Tensor  # [out] float32


class Int4Weight(NamedTuple):
    """An int4 weight: weight[o, i] is about (codes[o, i] - 8) * scale + offset of its group.

    The error is at most about half a scale.
    """

    codes: Tensor  # [out, in] int32, 0 .. 15
    groups: Tensor  # [in / 32, out, 2] bfloat16: scale and offset


def check_quantized(dtype: Literal["int8", "int4"]) -> None:
    """Raise ConfigError when this machine lacks the kernels for models of that type, or they are not exact."""
    if torch.backends.cpu.get_cpu_capability() == "AVX512" and _int8_is_exact() and (dtype == "int8" or _has_int4()):
        return
    raise ConfigError(
        f"dtype: {dtype} needs a CPU with AVX-512 VNNI, and torch with oneDNN and its kernels for int8 and int4, which "
        "are not available here; use bfloat16"
    )


def int8_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return the layer in int8, with float32 inputs and outputs. It keeps no reference to `weight`."""
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight))
    for rows, piece in _pieces(weight):
        codes[rows], scales[rows] = quantize_int8(piece)
    product = _int8_product(codes, scales)
    bias = None if bias is None else bias.float()
    step, zero = torch.tensor(1.0 / INT8_MOST), torch.tensor(INT8_ZERO, dtype=torch.uint8)

    def linear(x: Tensor) -> Tensor:
        scale = x.abs().amax(1, keepdim=True).clamp_min_(LEAST).mul_(step)
        quantized = x.div(scale).round_().to(torch.int8).view(torch.uint8).add_(zero)  # wraps around: x + 128
        y = product(quantized).mul_(scale)
        return y if bias is None else y.add_(bias)

    return Linear(linear, torch.float32, codes.nbytes + scales.nbytes)


def int4_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return the layer in int4, with bfloat16 inputs and outputs. It keeps no reference to `weight`.

    Raises ConfigError when the kernel does not support a weight of that shape.
    """
    outputs, inputs = weight.shape
    check_int4(outputs, inputs)
    pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default
    codes = torch.empty(outputs, inputs // 2, dtype=torch.uint8)
    groups = torch.empty(inputs // GROUP, outputs, 2, dtype=torch.bfloat16)
    for rows, piece in _pieces(weight):
        quantized = quantize_int4(piece)
        codes[rows] = pack(quantized.codes, 1)
        groups[:, rows] = quantized.groups
    bias = None if bias is None else bias.bfloat16()
    apply = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    def linear(x: Tensor) -> Tensor:
        y: Tensor = apply(x, codes, GROUP, groups)
        return y if bias is None else y.add_(bias)

    return Linear(linear, torch.bfloat16, codes.nbytes + groups.nbytes)


def quantize_int8(weight: Tensor) -> Int8Weight:
    """Return codes and scales of [out, in] weights."""
    exact = weight.float()
    scales = exact.abs().amax(1, keepdim=True).div_(INT8_MOST).clamp_min_(LEAST)
    return Int8Weight(exact.div(scales).round_().to(torch.int8), scales[:, 0])


def quantize_int4(weight: Tensor) -> Int4Weight:
    """Return codes, scales and offsets of [out, in] weights, `in` a multiple of 32.

    Equal weights of a group stay equal.
    """
    grouped = weight.float().reshape(len(weight), -1, GROUP)
    low, high = grouped.aminmax(dim=2, keepdim=True)
    span = (high - low).div_(15)
    offsets = (low + INT4_ZERO * span).bfloat16()
    scales = span.bfloat16()
    scales = scales.where(scales > 0, 1.0)
    codes = grouped.sub(offsets).div_(scales).round_().add_(INT4_ZERO).clamp_(0, 15)
    groups = torch.cat([scales, offsets], 2).transpose(0, 1)
    return Int4Weight(codes.flatten(1).to(torch.int32), groups.contiguous())


def _pieces(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the rows of a weight in pieces."""
    for start in range(0, len(weight), PIECE):
        rows = slice(start, min(start + PIECE, len(weight)))
        yield rows, weight[rows]


def _int8_product(codes: Tensor, scales: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the function that multiplies inputs with the weight: [rows, in] uint8 -> [rows, out] float32.

    The codes of the inputs are 128 too large.
    """
    packed = torch.ops.onednn.qlinear_prepack.default(codes, None)
    apply = torch.ops.onednn.qlinear_pointwise.default

    def product(x: Tensor) -> Tensor:
        y: Tensor = apply(x, 1.0, INT8_ZERO, packed, scales, None, None, 1.0, 0, torch.float32, "none", [], "")
        return y

    return product


def _int8_is_exact() -> bool:
    """Return whether the largest products are summed without saturation, which needs VNNI."""
    if not torch._C._has_mkldnn or not hasattr(torch.ops.onednn, "qlinear_prepack"):
        return False
    codes = torch.full((16, _COLUMNS), INT8_MOST, dtype=torch.int8)
    codes[1::2] *= -1
    product = _int8_product(codes, torch.ones(16))(torch.full((2, _COLUMNS), 255, dtype=torch.uint8))
    expected = codes.float().sum(1) * (255 - INT8_ZERO)
    return bool((product == expected).all())


def _has_int4() -> bool:
    return hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
