"""The parts of a day with a GPU: each has a process and a limit, and what has passed is not run again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench import gpu_cluster, gpu_day, gpu_parity, gpu_profile
from bench.gpu_day import Part, run

ON_CPU = ("--device", "cpu")
PROFILE = (*ON_CPU, "--shape", "tiny", "--context", "20")


def status_of(part: Part, folder: Path) -> str:
    return run(part, folder, time.monotonic() + 60)


def test_a_part_that_passed_is_skipped_and_a_part_that_failed_runs_again(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    writes = f"open({str(seen)!r}, 'a').write('x'); print('figure=1')"
    assert status_of(Part("good", ("-c", writes), 30), tmp_path) == "passed"
    assert status_of(Part("good", ("-c", writes), 30), tmp_path) == "passed"
    assert seen.read_text() == "x"
    content = json.loads((tmp_path / "good.json").read_text())
    assert content["lines"] == ["figure=1"]
    for _ in range(2):
        assert status_of(Part("bad", ("-c", f"{writes}; raise SystemExit(3)"), 30), tmp_path) == "failed"
    assert seen.read_text() == "xxx"


def test_a_part_beyond_its_time_limit_is_killed_even_if_it_ignores_signals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_day, "KILL_S", 0.3)
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    began = time.monotonic()
    assert status_of(Part("slow", ("-c", stubborn), 1.0), tmp_path) == "timed-out"
    assert time.monotonic() - began < 30
    assert json.loads((tmp_path / "slow.json").read_text())["lines"] == ["up"]


def test_a_part_without_its_program_or_without_time_is_named(tmp_path: Path) -> None:
    assert status_of(Part("none", ("-c", "1"), 9, program=("no-such-program",)), tmp_path) == "missing:no-such-program"
    assert run(Part("late", ("-c", "1"), 9), tmp_path, time.monotonic() - 1) == "no-time"
    assert not list(tmp_path.iterdir())


def test_the_last_line_has_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_day, "PARTS", (Part("a", ("-c", "1"), 9), Part("b", ("-c", "raise SystemExit(1)"), 9)))
    app = typer.Typer()
    app.command()(gpu_day.main)
    result = CliRunner().invoke(app, ["--output", str(tmp_path)])
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == "gpu_day: a=passed b=failed"
    assert CliRunner().invoke(app, ["--output", str(tmp_path), "--part", "a"]).exit_code == 0
    assert CliRunner().invoke(app, ["--part", "c"]).exit_code == 2


@pytest.mark.extended
@pytest.mark.parametrize(
    ("main", "arguments", "line"),
    [
        (gpu_parity.main, [*ON_CPU, "--model", "models/drafter", "--kind", "copies"], "parity: device=cpu"),
        (gpu_parity.main, [*ON_CPU, "--model", "models/drafter", "--kind", "adapters"], "parity: device=cpu adapters="),
        (gpu_profile.main, [*PROFILE, "--rows", "2"], "rows=2 dtype=bfloat16 best=0 adapters=0"),
        (gpu_profile.main, [*PROFILE, "--rows", "3", "--heads", "--levels", "2"], "heads=eagle-3 levels=3 round_ms="),
        (gpu_profile.main, [*PROFILE, "--rows", "1", "--texts", "3", "--adapters", "2"], "adapters=2 rank=16 step_ms="),
    ],
    ids=["copies", "adapters", "profile", "profile of heads", "profile of adapters"],
)
def test_gpu_parity_and_gpu_profile_run_without_a_gpu(
    main: Callable[..., None], arguments: list[str], line: str
) -> None:
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert line in result.output


@pytest.mark.extended
def test_a_cluster_is_verified_and_measured() -> None:
    app = typer.Typer()
    app.command()(gpu_cluster.main)
    options = ["--device", "cpu", "--shape", "tiny", "--dtype", "float32", "--callers", "1", "--seconds", "1"]
    assert CliRunner().invoke(app, [*options, "--repetitions", "1", "--slots", "4"]).exit_code == 0
