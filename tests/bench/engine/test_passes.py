"""The suite of passes: what is measured of our engine, and the ratios made of it."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.engine import passes
from bench.engine.passes import (
    DTYPES,
    LLAMA_CPP,
    OURS,
    ROWS,
    PassTime,
    measure_passes,
    multiplied_weights,
    pass_limit_s,
)
from bench.engine.roofline import Limit
from bench.options import BenchOptions
from bench.report.figures import BenchResults
from bench.report.tables import print_tables
from outrider.engine.checkpoints.checkpoint import read_config
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.engine import Engine
from outrider.engine.interface.settings import EngineSettings
from tests.bench.rows.test_cluster import OPTIONS

MODELS = Path(__file__).parents[3] / "models"
LIMIT = Limit(2, read_gb_s=10.0, bfloat16_gflops=100.0, float32_gflops=50.0, ways={})


def entry(engine: str, rows: int, *seconds: float) -> PassTime:
    return PassTime(150_000_000, 2, engine, "bfloat16", rows, seconds, (0.005,) * len(seconds))


def test_ratios_are_medians_of_pairs_of_one_round() -> None:
    one, eight = entry(OURS, 1, 0.010, 0.020, 0.030), entry(OURS, 8, 0.020, 0.060, 0.060)
    assert eight.ms == pytest.approx(60.0)
    assert eight.over(one) == pytest.approx(2.0)  # of 2, 3 and 2
    assert eight.over_limit == pytest.approx(12.0)
    with pytest.raises(ValueError, match="argument"):
        eight.over(entry(OURS, 1, 0.01))


def test_the_limit_is_reading_for_few_rows_and_multiplying_for_many() -> None:
    assert pass_limit_s(LIMIT, 20_000_000, 10_000_000, 1) == pytest.approx(0.002)
    assert pass_limit_s(LIMIT, 20_000_000, 10_000_000, 32) == pytest.approx(0.0064)
    assert pass_limit_s(LIMIT, 5_000_000, 10_000_000, 1) == pytest.approx(0.0005)  # int4 reads less


def test_the_weights_that_a_row_meets_are_all_but_the_norms() -> None:
    engine = CpuEngine.load(MODELS / "target", EngineSettings(dtype="bfloat16", slots=1))
    config = read_config(MODELS / "target")
    assert multiplied_weights(config) == engine.parameters - config.width * (2 * config.layers + 1)


def test_a_pass_is_timed_behind_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Engine = CpuEngine.load(MODELS / "drafter", EngineSettings(dtype="float32", slots=1))
    seen: list[tuple[int, int, int]] = []
    forward = engine.forward

    def noted(segments: Any) -> Any:
        (segment,) = segments
        seen.append((segment.prefix, len(segment.tokens), segment.outputs))
        return forward(segments)

    monkeypatch.setattr(engine, "forward", noted)
    passes.fill_context(engine)
    assert 0.0 < passes.pass_seconds(engine, 12) < 30.0
    assert seen == [(0, 256, 0), (256, 12, 12), (256, 12, 12)]


@pytest.mark.extended
async def test_a_run_measures_every_type_and_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    @asynccontextmanager
    async def as_it_is(options: BenchOptions, parameters: int) -> AsyncIterator[Path]:
        yield MODELS / "drafter"

    class Peer:
        async def request(self, line: str) -> bytes:
            asked.append((LLAMA_CPP, len(line)))
            return b"0.25"

    @asynccontextmanager
    async def peer(models: Any) -> AsyncIterator[Any]:
        yield Peer()

    async def limit(threads: int) -> Limit:
        return LIMIT

    monkeypatch.setattr(passes, "padded", as_it_is)
    monkeypatch.setattr(passes, "llama_worker", peer)
    monkeypatch.setattr(passes, "measure", limit)
    workers = passes.worker

    class Reading:
        async def request(self, line: str) -> bytes:
            asked.append(("reading", 0))
            return b"10.0" if len(asked) % 2 else b"20.0"

    @asynccontextmanager
    async def ours(name: str, *command: str, **options: Any) -> AsyncIterator[Any]:
        async with nullcontext(Reading()) if name == "reading" else workers(name, *command, **options) as process:
            yield process

    monkeypatch.setattr(passes, "worker", ours)
    found = await measure_passes(replace(OPTIONS, llama_cpp=True), 3_000_000, lambda what: None)
    kinds = [*((OURS, dtype) for dtype in DTYPES), (LLAMA_CPP, "bfloat16")]
    measured = [(each.engine, each.dtype, each.rows) for each in found]
    assert measured == [(*kind, rows) for kind in kinds for rows in ROWS]
    assert all(len(each.seconds) == passes.ROUNDS >= 5 for each in found)
    assert len(asked) == 2 * passes.ROUNDS * len(ROWS)
    assert {each.ms for each in found if each.engine == LLAMA_CPP} == {250.0}
    assert all(0.0 < each.ms < 30_000.0 for each in found)
    config = read_config(MODELS / "drafter")
    (theirs,) = (each for each in found if (each.engine, each.rows) == (LLAMA_CPP, 1))
    least = 2 * multiplied_weights(config) / 1e9
    assert all(each in (pytest.approx(least / 10), pytest.approx(least / 20)) for each in theirs.limits)


def test_the_table_shows_times_and_ratios() -> None:
    def shown(*entries: PassTime) -> list[list[str]]:
        screen = Console(file=io.StringIO(), width=132)
        print_tables(screen, BenchResults(passes=list(entries)))
        assert isinstance(screen.file, io.StringIO)
        return [line.split() for line in screen.file.getvalue().splitlines()]

    ours = entry(OURS, 1, 0.02, 0.02, 0.02), entry(OURS, 8, 0.03, 0.03, 0.03)
    theirs = entry(LLAMA_CPP, 1, 0.01, 0.01, 0.01), entry(LLAMA_CPP, 8, 0.06, 0.06, 0.06)
    lines = shown(*ours, *theirs)
    assert lines[0][:3] == ["passes", "of", "150M"]
    assert [OURS, "bfloat16", "ms", "20.00", "30.00"] in lines
    assert [OURS, "bfloat16", "x", "one", "row", "1.00", "1.50"] in lines
    assert [OURS, "bfloat16", "x", "llama.cpp", "2.00", "0.50"] in lines
    assert [LLAMA_CPP, "bfloat16", "x", "limit", "2.00", "12.00"] in lines
    assert [OURS, "bfloat16", "x", "llama.cpp", "-", "-"] in shown(*ours)
