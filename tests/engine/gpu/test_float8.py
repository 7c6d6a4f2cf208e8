"""Linears of float8 weights lose what float32 sums and one rounding lose, and fit the processors of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.gpu.linears.float8 import FEW_ROWS, Float8Plan, linear8, quantized
from outrider.errors import ConfigError
from tests.engine.gpu import float8_cases as cases
from tests.engine.gpu.float8_cases import Case
from tests.engine.gpu.interpreter import runner
from tests.engine.gpu.kernel_resources import FLOAT8_SHAPES, SPILLED, compiled_float8

Run = Callable[..., Any]
ROUNDING = 1 + 2.0**-20  # of the quotient and of the scale, which are float32
SHAPES = [
    (4096, 6144),
    (4096, 4096),
    (4096, 28672),
    (14336, 4096),
    (2048, 3072),
    (2048, 2048),
    (2048, 16384),
    (8192, 2048),
]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    yield from runner(cases.run)


def check(run: Run, case: Case) -> None:
    outcome = run("compare", case)
    assert outcome.error <= 1.0, outcome
    assert outcome.repeated
    assert outcome.alone


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 64, 65])
def test_float8_products_are_close_for_any_number_of_rows(run: Run, rows: int, biased: bool) -> None:
    check(run, Case(rows, 1024, 200, biased))


@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 1), (48, 65), (272, 131), (2000, 7), (1040, 64)])
def test_float8_products_are_close_for_any_shape(run: Run, rows: int, inputs: int, outputs: int) -> None:
    check(run, Case(rows, inputs, outputs, biased=True))


def test_float8_products_are_close_with_partly_filled_parts(run: Run) -> None:
    """The last of four parts has one step, and that step 16 inputs."""
    check(run, Case(3, 2 * 3 * 64 + 16, 40, biased=True, sizes=(32, 64, 4, False, 4, 3)))


def test_float8_products_are_close_with_more_parts_than_steps(run: Run) -> None:
    check(run, Case(3, 192, 40, biased=True, sizes=(32, 64, 4, False, 4, 3)))


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("rows", [4, 50])
def test_a_weight_may_be_the_first_operand(run: Run, rows: int, splits: int) -> None:
    check(run, Case(rows, 1040, 100, biased=True, sizes=(64, 128, splits, True, 4, 3)))


@pytest.mark.parametrize("rows", [1, 33, 70])
def test_float8_products_of_large_inputs_stay_finite(run: Run, rows: int) -> None:
    check(run, Case(rows, 512, 64, biased=True, scale=1e30))


@pytest.mark.parametrize("buffer", [64, 64 * 4 + 5, 64 * 100])
def test_float8_products_are_close_with_a_buffer_of_any_size(run: Run, buffer: int) -> None:
    check(run, Case(65, 64, 6, biased=True, buffer=buffer))


def test_every_number_of_e4m3_is_exact(run: Run) -> None:
    assert run("every_number")


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 65])
def test_torch_operations_compute_float8_products_too(rows: int, biased: bool) -> None:
    weight = cases.weights(130, 272, "cpu")
    x, bias = cases.random(rows, 272, seed=2).bfloat16(), cases.random(130, seed=4) if biased else None
    assert cases.error(linear8(x, weight, bias), x, weight, bias) <= 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_quantizing_changes_a_weight_by_a_sixteenth_at_most(size: float, dtype: torch.dtype) -> None:
    weight = (cases.random(50, 1024, seed=5) * size * torch.logspace(-2, 2, 50)[:, None]).to(dtype)
    assert cases.largest_weight_error(weight) <= ROUNDING
    stored = quantized(weight)
    assert stored.values.float().abs().amax(1).tolist() == [448.0] * 50
    torch.testing.assert_close(stored.scales, weight.float().abs().amax(1) / 448, rtol=1e-6, atol=0.0)


def test_rows_of_zeros_and_tiny_numbers_are_quantized() -> None:
    weight = torch.zeros(3, 32)
    weight[1] = 1e-40
    weight[2, 3] = -1e-35
    stored = quantized(weight)
    assert stored.scales[0] == 1.0
    assert not stored.values.float()[0].any()
    assert cases.largest_weight_error(weight) <= ROUNDING
    assert stored.values.float()[2, 3] == -448.0
    assert stored.nbytes == 3 * 32 + 3 * 4


def test_weights_quantized_in_several_blocks_equal_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = cases.random(37, 64, seed=6)
    whole = quantized(weight)
    monkeypatch.setattr("outrider.engine.gpu.linears.float8.QUANTIZED_AT_ONCE", 64 * 5 + 3)
    parts = quantized(weight)
    assert torch.equal(whole.values.view(torch.uint8), parts.values.view(torch.uint8))
    assert torch.equal(whole.scales, parts.scales)


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 17, 64])
def test_a_plan_covers_all_inputs_with_parts_that_have_some(rows: int, inputs: int, outputs: int) -> None:
    plan = Float8Plan.of(rows, inputs, outputs)
    assert plan.rows >= rows
    assert (plan.splits - 1) * plan.part < inputs <= plan.splits * plan.part
    assert plan.part % plan.block_k == 0
    programs = -(-outputs // plan.block_n) * plan.splits
    assert 96 <= programs <= 7 * 132
    assert plan == Float8Plan.of(plan.rows, inputs, outputs)


def test_shapes_that_float8_kernels_do_not_support_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"has 24 inputs, which must be a multiple of 16; use bfloat16"):
        quantized(torch.ones(4, 24))
    with pytest.raises(ConfigError, match="has 100 inputs"):
        Float8Plan.of(1, 100, 64)
    for rows in (0, FEW_ROWS + 1):
        with pytest.raises(ValueError, match=f"of {rows} rows, of at most 64"):
            Float8Plan.of(rows, 64, 64)


@pytest.mark.extended
def test_kernels_for_an_h100_spill_next_to_no_registers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = [it for shape in FLOAT8_SHAPES for it in compiled_float8(Float8Plan.of(*shape))]
    assert {it.kernel for it in found} == {"multiply", "finish"}
    assert [it for it in found if it.spilled > SPILLED] == []
    assert max(it.shared for it in found) <= 227 * 1024 // 2  # two programs run on a processor
