"""`outrider bench` measures a cluster that runs, or prints in one line why it cannot."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.fleet.cluster import LocalCluster
from tests.e2e.tiny import make_tiny


def prompts(folder: Path, content: str = '{"prompt": "w1 w2 w3"}\n{"prompt": "w4 w5"}\n') -> str:
    file = folder / "prompts.jsonl"
    file.write_text(content, encoding="utf-8")
    return str(file)


@pytest.mark.parametrize(
    ("content", "flags", "fragments"),
    [
        ('{"prompt": "x"}\n', ("--address", "127.0.0.1:1"), ("no router can be reached at 127.0.0.1:1",)),
        ('{"prompt": "x"}\n', ("--address", "here"), ("address: is 'here', must be HOST:PORT",)),
        ('{"prompt": "x"}\n', ("--json", "no-such/o.json"), ("--json: no-such is not a folder",)),
        ("", (), ("holds no prompt",)),
        ("text\n", (), ("must hold JSON lines",)),
    ],
    ids=["dead cluster", "address", "json", "empty", "text"],
)
def test_what_cannot_be_measured_is_one_line_and_no_table(
    tmp_path: Path, content: str, flags: tuple[str, ...], fragments: tuple[str, ...]
) -> None:
    result = CliRunner().invoke(app, ["bench", prompts(tmp_path, content), *flags], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert not result.stdout
    for fragment in fragments:
        assert fragment in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures for minutes where there is a GPU")
def test_the_suite_for_gpus_states_plainly_that_nothing_was_run(capfd: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(app, ["bench", "--suite", "gpu"])
    assert result.exit_code == 0
    assert "gpu: nothing was run: torch sees no CUDA device here" in capfd.readouterr().out


def test_a_cluster_is_measured_over_prompts() -> None:
    result = CliRunner().invoke(app, ["bench"])
    assert result.exit_code == 2
    assert "PROMPTS.jsonl: a file of prompts is needed" in result.stderr


async def test_it_measures_a_running_cluster_both_ways(tmp_path: Path) -> None:
    target = make_tiny(tmp_path / "target", layers=2, width=32)
    config = ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": target}),
        verifier=[VerifierConfig(model=target, dtype="float32", slots=8)],
        drafter=[DrafterConfig(model=target, dtype="float32", slots=8)],
    )
    output = tmp_path / "figures.json"
    async with LocalCluster(config) as cluster:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "outrider.cli", "bench", prompts(tmp_path), "--address", cluster.router_address),
            *("--callers", "2", "--seconds", "1", "--repetitions", "1", "--max-tokens", "8", "--json", str(output)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        stdout, stderr = await child.communicate()
    assert child.returncode == 0, stderr.decode()
    assert "speedup" in stdout.decode()
    points = json.loads(output.read_text())
    assert [(point["callers"], point["speculative"]) for point in points] == [(2, True), (2, False)]
    speculative, plain = points
    assert speculative["goodput"] > 0
    assert plain["goodput"] > 0
    assert plain["acceptance_length"] == 1.0 <= speculative["acceptance_length"]
    assert plain["wire_bytes_per_token"] == 0 < speculative["wire_bytes_per_token"]
