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
from outrider.cli.performance.aiperf import FILE
from outrider.cli.performance.points import LoadPoint, write_points
from outrider.client import AsyncClient
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.fleet.cluster import LocalCluster
from tests.e2e.tiny_models import make_tiny


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
        ('{"prompt": "x"}\n', ("--answers", "no-such/folder"), ("--answers: no-such is not a folder",)),
        ('{"prompt": "x"}\n', ("--plot", "plot.txt"), ("--plot: plot.txt must end in .png",)),
        ('{"prompt": "x"}\n', ("--against", "none.json"), ("none.json: No such file",)),
        (
            '{"prompt": "x"}\n',
            ("--answers", "answers", "--temperature", "0", "--temperature", "1"),
            ("--temperature: --answers takes one",),
        ),
        ("", (), ("holds no prompt",)),
        ("text\n", (), ("must hold JSON lines",)),
    ],
    ids=["dead cluster", "address", "json", "answers", "plot", "against", "temperatures", "empty", "text"],
)
def test_a_bench_that_cannot_run_prints_one_line_and_no_table(
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


def tiny_cluster(folder: Path) -> ClusterConfig:
    """A cluster whose drafter has the target's own model, and which always waits for its drafts: they do not pay."""
    target = make_tiny(folder / "target", layers=2, width=32)
    return ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": target}, policy="rounds", depth=4),
        verifier=[VerifierConfig(model=target, dtype="float32", slots=8)],
        drafter=[DrafterConfig(model=target, dtype="float32", slots=8)],
    )


async def run(*command: str, status: int = 0) -> str:
    """What `outrider` prints, or its error. Raises AssertionError where it ends with another status."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider.cli", *command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = await child.communicate()
    assert child.returncode == status, stderr.decode()
    return (stderr if status else stdout).decode()


async def test_the_bench_measures_a_running_cluster_with_and_without_speculation(tmp_path: Path) -> None:
    output, plotted, exported = tmp_path / "figures.json", tmp_path / "plot.png", tmp_path / "aiperf"
    earlier = tmp_path / "earlier.json"
    write_points(earlier, [LoadPoint(2, at, True, 1.0 + at / 100, 1, 1.0, 0.1, 0.1, 0.1, 9.0) for at in range(2)])
    async with LocalCluster(tiny_cluster(tmp_path)) as cluster:
        async with AsyncClient(cluster.router_address) as client:  # opens the drafter's stream before the second counts
            while not (await client.generate("w1 w2", max_tokens=8)).usage.accepted:
                pass
        shown = await run(
            *("bench", prompts(tmp_path), "--address", cluster.router_address, "--callers", "2", "--seconds", "1"),
            *("--repetitions", "1", "--max-tokens", "8", "--json", str(output), "--plot", str(plotted)),
            *("--aiperf", str(exported), "--against", str(earlier)),
        )
    assert "speedup" in shown
    assert "too few repetitions" in shown
    assert plotted.read_bytes().startswith(b"\x89PNG")
    exports = {file.parent.name: json.loads(file.read_text()) for file in exported.rglob(FILE)}
    assert exports.keys() == {"2-callers-plain-1", "2-callers-speculative-1"}
    assert all(export["output_sequence_length"]["avg"] == 8.0 for export in exports.values())
    points = json.loads(output.read_text())
    assert [(point["callers"], point["speculative"]) for point in points] == [(2, True), (2, False)]
    speculative, plain = points
    assert speculative["goodput"] > 0
    assert plain["goodput"] > 0
    assert plain["acceptance_length"] == 1.0 <= speculative["acceptance_length"]
    assert plain["wire_bytes_per_token"] == 0 < speculative["wire_bytes_per_token"]


async def test_the_bench_answers_spec_bench_questions_with_and_without_speculation(tmp_path: Path) -> None:
    asked = [
        {"question_id": 81, "category": "writing", "turns": ["w1 w2", " w3"]},
        {"question_id": 82, "category": "math", "turns": ["w4"]},
    ]
    file = prompts(tmp_path, "".join(f"{json.dumps(question)}\n" for question in asked))
    folder = tmp_path / "answers"
    async with LocalCluster(tiny_cluster(tmp_path)) as cluster:
        shown = await run(
            *("bench", file, "--address", cluster.router_address, "--raw", "--max-tokens", "12"),
            *("--temperature", "1", "--answers", str(folder)),
        )
        full = await run(
            *("bench", file, "--address", cluster.router_address, "--raw", "--max-tokens", "2", "--seconds", "1"),
            *("--repetitions", "1", "--callers", "1", "--json", "/dev/full"),
            status=2,
        )
    assert "cannot be written (No space left on device)" in full
    assert "2 of 2" in shown
    plain, drafted = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("outrider-plain.jsonl", "outrider.jsonl")
    )
    for answers in (plain, drafted):
        assert [(line["question_id"], line["category"]) for line in answers] == [(81, "writing"), (82, "math")]
        for line in answers:
            (choice,) = line["choices"]
            turns = len(choice["turns"])
            assert len(choice["new_tokens"]) == len(choice["wall_time"]) == len(choice["decoding_steps"]) == turns
            assert sum(choice["accept_lengths"]) >= sum(choice["new_tokens"])  # what max_tokens cuts off was accepted
            assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
    assert [line["choices"][0]["turns"] for line in plain] == [line["choices"][0]["turns"] for line in drafted]
    assert all(length == 1 for line in plain for length in line["choices"][0]["accept_lengths"])
