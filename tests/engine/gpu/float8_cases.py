"""Linears of float8 weights on random inputs: differences from float64 products, beside what float32 sums may lose."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.engine.gpu.linears import float8
from outrider.engine.gpu.linears.float8 import Float8Plan, Float8Weight, quantized

FLOAT32 = (
    2.0**-21
)  # of the sum of all absolute products: what sums of float32 in any order, of up to 2^14 numbers, lose
BFLOAT16 = 2.0**-8  # half of the last bit of the result, relative


class Case(NamedTuple):
    rows: int
    inputs: int
    outputs: int
    biased: bool = False
    scale: float = 1.0  # of the inputs
    buffer: int | None = None  # numbers
    sizes: tuple[int, int, int, bool, int, int] | None = None  # of the plan: block_n and what follows it


class Outcome(NamedTuple):
    error: float  # in units of what rounding explains: at most 1
    repeated: bool  # a second run has the same bits
    alone: bool  # the first row has the same bits where the other rows are others


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(outputs: int, inputs: int, device: str) -> Float8Weight:
    """Of all sizes, among them a row of zeros and one of a single number."""
    weight = random(outputs, inputs, seed=1) * torch.logspace(-3, 3, outputs)[:, None]
    weight[outputs // 2] = 0.0
    weight[-1] = 0.0
    weight[-1, -1] = 7.0
    return quantized(weight.bfloat16().to(device))


def error(result: Tensor, x: Tensor, weight: Float8Weight, bias: Tensor | None) -> float:
    """The largest difference from the product in float64, in units of what rounding explains; infinite for NaN."""
    assert result.dtype == torch.bfloat16
    exact = weight.values.float().double() * weight.scales.double()[:, None]
    expected, size = x.double() @ exact.t(), x.double().abs() @ exact.abs().t()
    if bias is not None:
        expected, size = expected + bias.double(), size + bias.double().abs()
    assert result.shape == expected.shape
    allowed = expected.abs() * BFLOAT16 + size * FLOAT32
    apart = (result.double() - expected).abs()
    found = torch.where(apart == 0.0, 0.0, apart / allowed)
    return float(found.nan_to_num(torch.inf).max())


def compare(case: Case, device: str) -> Outcome:
    weight = weights(case.outputs, case.inputs, device)
    x = (random(case.rows, case.inputs, seed=2) * case.scale).bfloat16().to(device)
    others = torch.cat((x[:1], random(case.rows - 1, case.inputs, seed=3).bfloat16().to(device)))
    bias = (random(case.outputs, seed=4) * 30).bfloat16().to(device) if case.biased else None
    first, second, third = (_run(case, given, weight, bias) for given in (x, x, others))
    return Outcome(error(first, x, weight, bias), torch.equal(first, second), torch.equal(first[0], third[0]))


def _run(case: Case, x: Tensor, weight: Float8Weight, bias: Tensor | None) -> Tensor:
    if x.device.type == "cpu":  # where torch has no product of bfloat16 with a result of float32
        float8.product = lambda x, weights: x.float() @ weights.float().t()
    if case.sizes is not None:
        padded = next(most for most in (16, 32, 64) if case.rows <= most)
        plan = Float8Plan.sized(padded, case.inputs, *case.sizes)
        return float8.planned(x, weight, bias, plan)
    buffer = None
    if case.buffer is not None:
        buffer = torch.full((case.buffer,), torch.nan, dtype=torch.bfloat16, device=x.device)
    return float8.by_kernels(x, weight, bias, buffer)


def every_number(device: str) -> bool:
    """Return whether all finite numbers of e4m3 are multiplied exactly."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0  # NaN
    values = torch.diag(torch.ones(256)).to(torch.float8_e4m3fn).view(torch.uint8).mul(0)
    values[torch.arange(256), torch.arange(256)] = codes
    weight = Float8Weight(values.view(torch.float8_e4m3fn).to(device), torch.ones(256, device=device))
    x = torch.ones(1, 256, dtype=torch.bfloat16, device=device)
    result = float8.by_kernels(x, weight)
    return torch.equal(result[0].cpu().float(), codes.view(torch.float8_e4m3fn).float())


def run(name: str, *arguments: Any) -> Any:
    """Run one of these functions in the process that interprets kernels."""
    with torch.inference_mode():
        return globals()[name](*arguments)


def largest_weight_error(weight: Tensor) -> float:
    """The largest change of a weight by `quantized`, in units of its bound."""
    stored = float8.quantized(weight)
    back = stored.values.float().double() * stored.scales.double()[:, None]
    exact = weight.double()
    allowed = torch.maximum(exact.abs() / 16, stored.scales.double()[:, None] * 2.0**-10)
    return float(((back - exact).abs() / allowed).nan_to_num(torch.inf).max())
