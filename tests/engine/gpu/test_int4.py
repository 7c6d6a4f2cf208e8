"""Linears of int4 weights lose what float32 sums and one rounding lose, and fit the processors of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.gpu.linears.int4 import LARGEST, linear4, plan_of, quantized4
from outrider.errors import ConfigError
from tests.engine.gpu import int4_cases as cases
from tests.engine.gpu.float8_cases import random
from tests.engine.gpu.int4_cases import Case
from tests.engine.gpu.interpreter import runner
from tests.engine.gpu.kernel_resources import FLOAT8_SHAPES, SPILLED, compiled_int4

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    yield from runner(cases.run)


@pytest.mark.parametrize(
    "case",
    [
        *(Case(rows, 1024, 200, biased=rows % 2 == 1) for rows in (1, 3, 16, 17, 64, 65)),
        *(Case(2, inputs, outputs, biased=True) for inputs, outputs in ((32, 1), (96, 65), (288, 131), (1056, 64))),
        Case(3, 2 * 3 * 64 + 32, 40, biased=True, sizes=(32, 64, 4, False, 4, 3)),  # the last step is half full
        Case(3, 192, 40, biased=True, sizes=(32, 64, 4, False, 4, 3)),  # more parts than steps
        Case(40, 1056, 100, biased=True, sizes=(64, 128, 4, True, 4, 3)),
        Case(40, 1024, 100, biased=True, sizes=(64, 128, 1, True, 4, 3)),
        *(Case(65, 64, 6, biased=True, buffer=buffer) for buffer in (64, 64 * 4 + 5, 64 * 100)),
    ],
    ids=str,
)
def test_int4_products_are_close_for_any_number_of_rows_and_any_shape(run: Run, case: Case) -> None:
    error, alone = run("compare", case)
    assert error <= 1.0
    assert alone


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 65])
def test_torch_operations_compute_int4_products_too(rows: int, biased: bool) -> None:
    weight = cases.weights(130, 288, "cpu")
    x, bias = random(rows, 288, seed=2).bfloat16(), random(130, seed=4) if biased else None
    assert cases.error(linear4(x, weight, bias), x, weight, bias) <= 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_quantizing_changes_a_weight_by_half_a_step_at_most(size: float, dtype: torch.dtype) -> None:
    weight = (random(50, 1024, seed=5) * size * torch.logspace(-2, 2, 50)[:, None]).to(dtype)
    stored = quantized4(weight)
    largest = weight.double().view(50, 32, 32).abs().amax(2, keepdim=True).expand(50, 32, 32).reshape(50, 1024)
    apart = (stored.exact().double() - weight.double()).abs()
    assert (apart <= largest / LARGEST * 0.53 + weight.double().abs() * 2.0**-8).all()
    assert stored.nbytes == 50 * 1024 // 2 + 2 * 50 * 32


def test_rows_of_zeros_stay_zeros() -> None:
    weight = torch.zeros(3, 64)
    weight[1, 40] = -1e-20
    stored = quantized4(weight).exact()
    assert not stored[0].any()
    assert stored[1].nonzero().tolist() == [[40]]


def test_inputs_that_have_no_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"has 48 inputs, which must be a multiple of 32; use float8"):
        quantized4(torch.ones(4, 48))


@pytest.mark.extended
def test_kernels_for_an_h100_spill_next_to_no_registers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = [it for shape in FLOAT8_SHAPES for it in compiled_int4(plan_of(*shape))]
    assert found
    assert [it for it in found if it.spilled > SPILLED] == []
    assert max(it.shared for it in found) <= 227 * 1024 // 2  # two programs run on a processor
