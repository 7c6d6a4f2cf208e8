"""Processor time of each token: the scripted engine, the stages, and a run of the whole benchmark."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.cpu.engine import ScriptedEngine
from bench.cpu.stages import STAGES
from outrider.core.sampling.noise import Draw
from outrider.engine.interface.batch import Segment

ROOT = Path(__file__).parents[3]
MODELS = ROOT / "models"
DRAWN = Draw(1, 0.0)


def engine(name: str, acceptance: float, *, drafts: bool) -> ScriptedEngine:
    return ScriptedEngine(MODELS / name, slots=2, rows=None, acceptance=acceptance, drafts=drafts, pass_s=0.0)


@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
def test_a_drafters_likeliest_token_is_the_targets_at_the_scripted_rate(acceptance: float) -> None:
    target, drafter = engine("target", acceptance, drafts=False), engine("drafter", acceptance, drafts=True)
    count = target.context
    positions = np.arange(count)
    segments = [Segment(0, 0, positions % target.vocabulary, positions), Segment(1, 0, positions[:3], positions[:3])]
    chosen, drafted = target.sample(segments, [DRAWN] * 2), drafter.sample(segments, [DRAWN] * 2, best=8)
    hits = listed = 0
    for row in range(count):
        choice, best = chosen.choice(row), drafted.best(row)
        assert choice is not None
        assert best is not None
        assert len({*best.tokens}) == len(best.tokens) == len(best.scores) == 8
        hits += best.tokens[0] == choice.token
        listed += choice.token in best.tokens
    assert hits / count == pytest.approx(acceptance, abs=0.05)
    assert listed / count == pytest.approx(acceptance, abs=0.05)  # and no other candidate is
    assert [chosen.choice(row) for row in range(3)] == [chosen.choice(count + row) for row in range(3)]


def test_every_stage_names_a_function_that_exists() -> None:
    for stages in STAGES.values():
        for file, function in stages:
            defined = {
                node.name
                for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            assert not function or function in defined, (file, function)


@pytest.mark.extended
def test_a_run_measures_every_process_and_divides_its_time_into_stages(tmp_path: Path) -> None:
    saved = tmp_path / "figures.json"
    command = [sys.executable, "-m", "bench.cpu", "--sessions", "2", "--seconds", "6", "--json", str(saved)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    names = ["router_us", "verifier_us", "drafter_us", "client_us", "router_tokens_s_core", "overhead_ms"]
    assert re.fullmatch("cpu: " + " ".join(rf"{name}=[\d.]+" for name in names), run.stdout.splitlines()[-1])
    plain, trees = json.loads(saved.read_text(encoding="utf-8"))
    assert (plain["drafted"], trees["drafted"]) == (False, True)
    assert plain["tokens_per_chunk"] < 1.5 < trees["tokens_per_chunk"]  # trees are verified, and their tokens kept
    for measured in (plain, trees):
        assert measured["tokens_per_s"] > 0
        for name in {"router", "verifier-0", "client"} | ({"drafter-0"} if measured["drafted"] else set()):
            used, stages = measured["us"][name], measured["stages"][name]
            assert sum(stages.values()) == pytest.approx(used, rel=0.25)
            assert sum(seconds > 0 for seconds in stages.values()) >= 3


@pytest.mark.extended
def test_callers_by_http_count_the_tokens_that_the_verifier_commits(tmp_path: Path) -> None:
    saved = tmp_path / "figures.json"
    command = [
        sys.executable,
        "-m",
        "bench.cpu",
        "--gateway",
        "--sessions",
        "2",
        "--seconds",
        "6",
        "--json",
        str(saved),
    ]
    subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    [measured] = json.loads(saved.read_text(encoding="utf-8"))
    assert measured["us"]["gateway"] > 0
    assert measured["stages"]["gateway"]["send"] > 0
    assert measured["tokens_per_s"] > 50
