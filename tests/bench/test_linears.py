"""The suite that compares kernels measures every linear, and counts the bytes that an engine counts."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bench.figures import Results
from bench.linears import DTYPES, HEAD, ROWS, WHOLE, Cost, measured
from bench.tables import print_tables
from outrider.engine.native import NativeEngine
from outrider.errors import CheckpointError
from tests.engine.checkpoints import make_checkpoint

NAMES = ("qkv", "output", "gate_up", "down", HEAD, WHOLE)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("small"), ffn=96)


@pytest.fixture(scope="module")
def costs(checkpoint: Path) -> list[Cost]:
    return list(measured(checkpoint, 0, torch.get_num_threads()))


def test_every_linear_is_measured_with_every_type_and_number_of_rows(costs: list[Cost]) -> None:
    found = {(cost.linear, cost.dtype, cost.rows) for cost in costs}
    assert found == {(name, dtype, rows) for name in NAMES for dtype in DTYPES for rows in ROWS}
    assert all(0 < cost.microseconds < 1e6 for cost in costs)


def test_a_pass_reads_the_bytes_that_an_engine_says(costs: list[Cost], checkpoint: Path) -> None:
    for dtype in DTYPES:
        sizes = {cost.bytes for cost in costs if (cost.linear, cost.dtype) == (WHOLE, dtype)}
        assert sizes == {NativeEngine.load(checkpoint, dtype=dtype, slots=1).weight_bytes}


def test_the_table_shows_microseconds_and_rates_side_by_side() -> None:
    screen = Console(file=io.StringIO(), width=132)
    of = {rows: Cost(150_000_000, 2, "down", "int8", rows, 50.0 * rows, 2_000_000) for rows in (1, 32)}
    print_tables(screen, Results(linears=list(of.values())))
    assert isinstance(screen.file, io.StringIO)
    text = screen.file.getvalue()
    assert "linears of 150M, 2 threads" in text
    assert text.splitlines()[-1].split() == ["down", "int8", "2000", "50", "40.0", "1600", "1.2"]


def test_a_checkpoint_cannot_be_padded_to_less(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="more than 1000 parameters"):
        next(measured(checkpoint, 1000, 1))
