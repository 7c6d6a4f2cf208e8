"""What adapters add to linears is B A x, for the rows that have one and for no others; its kernels fit a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.engine.adapters.low_rank import MOST_RANK
from outrider.engine.gpu.adapters.adapter_memory import AdapterForm, DeviceAdapter
from outrider.engine.gpu.adapters.low_rank import (
    MAX_SPLITS,
    TILE_COLUMNS,
    AdapterPlan,
    LinearName,
    adapted_linears,
    lay_adapter_tiles,
)
from outrider.engine.gpu.passes.packing import ROWS
from tests.engine.gpu import low_rank_cases as cases
from tests.engine.gpu.interpreter import runner
from tests.engine.gpu.kernel_resources import SPILLED, adapter_plans, compiled_low_rank
from tests.engine.gpu.low_rank_cases import SHAPES, WIDE, Case, segments_of

Run = Callable[..., Any]
ALL = (4, 4, 4, 4, 4, 4, 4)
SOME = (16, 0, 33, 0, 1, 20, 0)
LINEARS: tuple[LinearName, ...] = ("qkv", "output", "gate_up", "down")


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    yield from runner(cases.run)


def check(run: Run, case: Case) -> cases.Outcome:
    outcome: cases.Outcome = run("compare", case)
    assert outcome.error <= 2.0  # the product with A is rounded as well as the result
    assert outcome.untouched
    return outcome


def on_torch(name: str, *arguments: Any) -> Any:
    return cases.run(name, *arguments, "cpu")


@pytest.mark.parametrize("by_address", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("linear", LINEARS)
def test_rows_with_several_adapters_and_without_share_a_pass(
    run: Run, linear: LinearName, dtype: str, by_address: bool
) -> None:
    case = Case((1, 3, 1, 2, 1), (0, None, 1, 0, 2), (ALL, SOME, (7,) * 7), 12, linear, dtype, by_address=by_address)
    assert check(on_torch if by_address else run, case).tiles == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("linear", ["qkv", "down"])
def test_several_programs_share_the_inputs_of_a_linear(run: Run, linear: LinearName, dtype: str) -> None:
    """The last of them has fewer inputs, or none."""
    plan = AdapterPlan.of(4, adapters=4, dtype=getattr(torch, dtype))
    assert plan.splits(2100) in (8, 16)
    check(run, Case((1, 1), (0, 1), (ALL, (20,) * 7), 4, linear, dtype, WIDE))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_one_adapter_share_tiles(run: Run, dtype: str) -> None:
    """The rows of one adapter are together in tiles, though others lie between them."""
    case = Case((70, 9, 33), (0, 1, 0), (SOME, ALL), 128, "gate_up", dtype)
    assert check(run, case).tiles == {"float32": 8, "bfloat16": 3}[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_of_the_largest_rank_is_added(run: Run, dtype: str) -> None:
    check(run, Case((2,), (0,), ((0, MOST_RANK, 1, 0, 0, 0, 0),), 2, "qkv", dtype))


def test_a_pass_of_padding_alone_changes_nothing(run: Run) -> None:
    assert check(run, Case((3,), (None,), (ALL,), 4, "qkv")).tiles == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rows_bits_do_not_depend_on_the_adapters_of_other_rows(run: Run, dtype: str) -> None:
    assert run("alone_and_together", dtype)


@pytest.mark.parametrize("seed", range(20))
def test_an_adapter_plan_has_tiles_for_any_adapters_that_fill_its_rows(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, slots = int(random.choice(ROWS)), int(random.integers(1, 40))
    plan = AdapterPlan.of(rows, adapters=slots, dtype=torch.bfloat16)
    form = AdapterForm(1, SHAPES, torch.bfloat16, torch.device("cpu"))
    adapters = [DeviceAdapter(form, torch.zeros(8, dtype=torch.uint8)) for _ in range(slots)]
    for _ in range(20):
        cuts = np.sort(random.integers(0, rows + 1, random.integers(0, min(rows, slots))))
        counts = np.diff(np.concatenate(([0], cuts, [rows]))).tolist()
        chosen = [adapters[at] for at in random.integers(0, slots, len(counts))]
        tiles, order = np.full((plan.capacity, TILE_COLUMNS), 9, np.int64), np.full(rows, -1, np.int32)
        used = lay_adapter_tiles(segments_of(counts, chosen), plan.tile_rows, order, tiles)
        assert sorted(order.tolist()) == list(range(rows))
        address = np.repeat([it.address for it in chosen], counts)
        for first, count, own in tiles[:used].tolist():
            assert 0 < count <= plan.tile_rows
            assert (address[order[first : first + count]] == own).all()
        assert tiles[:used, 1].sum() == rows
        assert not tiles[used:].any()


def test_one_text_is_split_over_many_programs_and_a_wide_pass_hardly() -> None:
    linear = adapted_linears(AdapterForm(1, WIDE, torch.bfloat16, torch.device("cpu")))["down"]
    one, wide = (AdapterPlan.of(rows, adapters=9, dtype=torch.bfloat16) for rows in (1, 2048))
    assert (one.splits(8192), wide.splits(8192)) == (MAX_SPLITS, 2)
    for plan in (one, wide):
        assert plan.part(linear.inputs) * plan.splits(linear.inputs) >= linear.inputs
        assert plan.part(linear.inputs) % plan.block_k == 0


def test_adapter_tiles_that_do_not_fit_are_refused() -> None:
    adapter = DeviceAdapter(
        AdapterForm(1, SHAPES, torch.float32, torch.device("cpu")), torch.zeros(8, dtype=torch.uint8)
    )
    tiles, order = np.zeros((2, TILE_COLUMNS), np.int64), np.zeros(40, np.int32)
    with pytest.raises(ValueError, match="3 tiles of 40 rows, of at most 2 and 40"):
        lay_adapter_tiles(segments_of([40], [adapter]), 16, order, tiles)
    with pytest.raises(ValueError, match="1 tiles of 41 rows, of at most 2 and 40"):
        lay_adapter_tiles(segments_of([35, 6], [None, adapter]), 16, order, tiles)
    with pytest.raises(ValueError, match="float16"):
        AdapterPlan.of(1, adapters=1, dtype=torch.float16)


@pytest.mark.extended
def test_kernels_for_an_h100_spill_next_to_no_registers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = [it for plan, dtype in adapter_plans() for it in compiled_low_rank(plan, dtype)]
    assert {it.kernel for it in found} == {"shrink", "expand"}
    assert [it for it in found if it.spilled > SPILLED] == []
    assert max(it.shared for it in found) <= 227 * 1024 // 2  # two programs run on a processor
