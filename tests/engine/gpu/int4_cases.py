"""Linears of int4 weights on random inputs: differences from float64 products, beside what float32 sums may lose."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.engine.gpu.linears import float8, int4
from outrider.engine.gpu.linears.float8 import Float8Plan
from outrider.engine.gpu.linears.int4 import GroupedInt4Weight, quantized4
from tests.engine.gpu.float8_cases import BFLOAT16, FLOAT32, random


class Case(NamedTuple):
    rows: int
    inputs: int
    outputs: int
    biased: bool = False
    buffer: int | None = None  # numbers
    sizes: tuple[int, int, int, bool, int, int] | None = None  # of the plan: block_n and what follows it


def weights(outputs: int, inputs: int, device: str) -> GroupedInt4Weight:
    """Of all sizes, among them a row of zeros and one of a single number."""
    weight = random(outputs, inputs, seed=1) * torch.logspace(-3, 3, outputs)[:, None]
    weight[outputs // 2] = 0.0
    weight[-1] = 0.0
    weight[-1, -1] = 7.0
    return quantized4(weight.bfloat16().to(device))


def error(result: Tensor, x: Tensor, weight: GroupedInt4Weight, bias: Tensor | None) -> float:
    """The largest difference from the product in float64, in units of what rounding explains; infinite for NaN."""
    exact = weight.exact().double()
    expected, size = x.double() @ exact.t(), x.double().abs() @ exact.abs().t()
    if bias is not None:
        expected, size = expected + bias.double(), size + bias.double().abs()
    assert result.shape == expected.shape
    apart = (result.double() - expected).abs()
    found = torch.where(apart == 0.0, 0.0, apart / (expected.abs() * BFLOAT16 + size * FLOAT32))
    return float(found.nan_to_num(torch.inf).max())


def compare(case: Case, device: str) -> tuple[float, bool]:
    """The error, and whether the first row has the same bits where the other rows are others."""
    weight = weights(case.outputs, case.inputs, device)
    x = random(case.rows, case.inputs, seed=2).bfloat16().to(device)
    others = torch.cat((x[:1], random(case.rows - 1, case.inputs, seed=3).bfloat16().to(device)))
    bias = (random(case.outputs, seed=4) * 30).bfloat16().to(device) if case.biased else None
    first, second = (_run(case, given, weight, bias) for given in (x, others))
    return error(first, x, weight, bias), torch.equal(first[0], second[0])


def _run(case: Case, x: Tensor, weight: GroupedInt4Weight, bias: Tensor | None) -> Tensor:
    if x.device.type == "cpu":  # where torch has no product of bfloat16 with a result of float32
        float8.product = lambda x, weights: x.float() @ weights.float().t()
    if case.sizes is not None:
        padded = next(most for most in (16, 32, 64) if case.rows <= most)
        return int4.planned(x, weight, bias, Float8Plan.sized(padded, case.inputs, *case.sizes))
    buffer = None
    if case.buffer is not None:
        buffer = torch.full((case.buffer,), torch.nan, dtype=torch.bfloat16, device=x.device)
    return int4.by_kernels(x, weight, bias, buffer)


def run(name: str, *arguments: Any) -> Any:
    """Run one of these functions in the process that interprets kernels."""
    with torch.inference_mode():
        return globals()[name](*arguments)
