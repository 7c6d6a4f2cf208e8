"""The suite for accelerators runs anywhere on a tiny shape without a server's libraries, or reports that none ran."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from bench import gpu
from bench.gpu import GpuRun, Point
from bench.peers import gpt_fast
from bench.report.figures import BenchResults
from bench.report.tables import print_tables
from bench.rows.rounds import RoundGrowth, RoundRunner, RoundText
from bench.running import run_gpu
from outrider.core.session.contract import Contract
from outrider.engine.checkpoints.checkpoint import Weights, read_config
from outrider.engine.checkpoints.padding import PaddedWeights, known_shape
from outrider.engine.gpu import DeviceEngine
from outrider.engine.interface.settings import EngineSettings
from outrider.errors import ConfigError
from tests.engine.small_checkpoints import MODELS

SMALL = ["--device", "cpu", "--shape", "tiny", "--dtype", "float32", "--context", "40", "--tokens", "12"]
WITHOUT = """
import runpy, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("grpc", "redis", "google", "transformers", "matplotlib", "ray"):
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
sys.argv = ["bench.gpu", *sys.argv[1:]]
runpy.run_module("bench.gpu", run_name="__main__")
"""


def test_the_gpu_bench_runs_on_a_machine_without_server_libraries(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    arguments = [*SMALL, "--batch", "1", "--batch", "3", "--repetitions", "1", "--json", str(path)]
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT, *arguments], capture_output=True, text=True, check=False, cwd=MODELS.parent
    )
    assert run.returncode == 0, run.stderr
    last = run.stdout.splitlines()[-1]
    # The fraction is of two short measurements: on a busy machine either may be the faster.
    assert re.match(r"gpu: shape=tiny batch=3 temperature=1 floor_fraction=\d\.\d+ datasheet_fraction=- ", last)
    assert re.search(r" plain_tok_s=\d+\.\d spec_tok_s=\d+\.\d ratio=\d+\.\d\d ", last)
    points = json.loads(path.read_text())["points"]
    assert [point["batch"] for point in points] == [1, 3]
    for point in points:
        assert point["same"] == point["batch"]
        assert 1.0 < point["acceptance_length"] <= 7.0
        assert point["ratio"] == pytest.approx(point["spec_tok_s"] / point["plain_tok_s"])
        assert point["parameters"] > 20_000_000
    # A plain step reads all weights but the embedding (and the last norm, which is not counted), and the texts' KV:
    # 8 layers of 4 heads of 64, keys and values.
    row = 8 * 2 * 4 * 64 * 4
    weights = 4 * (points[0]["parameters"] - 6000 * 512 - 512)
    assert [point["step_bytes"] for point in points] == [weights + batch * (40 + 6) * row for batch in (1, 3)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_the_gpu_bench_without_a_device_reports_that_nothing_was_run(tmp_path: Path) -> None:
    import typer

    app = typer.Typer()
    app.command()(gpu.main)
    path = tmp_path / "gpu.json"
    result = CliRunner().invoke(app, ["--json", str(path)])
    assert result.exit_code == 0
    assert "nothing was run: torch sees no CUDA device here" in result.output
    assert not path.exists()
    for flags, named in (
        (["--device", "cuda"], "there is no cuda here"),
        (["--device", "cpu", "--shape", "70b"], "--shape: is '70b'"),
        (["--device", "cpu", "--drafter", "70b"], "--drafter: is '70b'"),
        (["--device", "cpu", "--tree", "1=2,3"], "--tree: is '1=2,3'"),
        (["--device", "cpu", "--json", str(tmp_path / "none" / "x")], "is not a folder"),
    ):
        result = CliRunner().invoke(app, flags)
        assert result.exit_code == 2
        assert named in result.output


POINT = Point(
    shape="8b", batch=8, temperature=0.0, context=512, tokens=64, dtype="bfloat16", parameters=8, step_bytes=15_000,
    copy_bytes_s=4e6, datasheet_bytes_s=5e6, plain_step_ms=5.0, plain_tok_s=1600.0, drafter="1b", growth=(4, 2, 3, 7),
    spec_step_ms=9.0, spec_tok_s=4000.0, acceptance_length=4.5, same=7, widest_gap=0.2, gpt_fast_step_ms=4.0,
)  # fmt: skip


def test_the_gpu_figures_follow_from_the_measured_times() -> None:
    assert POINT.floor_ms == pytest.approx(3.75)
    assert POINT.line == (
        "gpu: shape=8b batch=8 temperature=0 floor_fraction=0.750 datasheet_fraction=0.600 plain_step_ms=5.000 "
        "plain_tok_s=1600.0 spec_tok_s=4000.0 ratio=2.50 acceptance_length=4.50 same=7/8 widest_gap=0.2000 "
        "gpt_fast_tok_s=2000.0"
    )
    assert POINT.sound
    assert not replace(POINT, dtype="float32").sound
    assert not replace(POINT, widest_gap=0.3).sound


@pytest.fixture(scope="module")
def engines() -> tuple[DeviceEngine, DeviceEngine]:
    loading = {"device": "cpu", "dtype": "float32", "slots": 3, "rows": 330}
    made = [DeviceEngine.load(MODELS / name, EngineSettings(**loading)) for name in ("target", "drafter")]  # type: ignore[arg-type]
    return made[0], made[1]


@pytest.mark.parametrize(
    "growth", [RoundGrowth(1, 1, 1, 1), RoundGrowth(3, 2, 3, 6), RoundGrowth(5, 4, 4, 15), RoundGrowth(4, 3, 2, 99)]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_commit_the_tokens_of_plain_decoding(
    engines: tuple[DeviceEngine, DeviceEngine], growth: RoundGrowth, temperature: float
) -> None:
    prompts = [[5, 6, 7, 8], list(range(40, 90)), [9]]

    def generated(rounds: RoundRunner) -> tuple[list[list[int]], int]:
        texts = [
            RoundText(slot, [*prompt], Contract(seed=slot, max_tokens=99, temperature=temperature))
            for slot, prompt in enumerate(prompts)
        ]
        rounds.read(texts)
        steps = 0
        while min(len(text.choices) for text in texts) < 24:
            assert rounds.step(texts) >= len(texts)
            steps += 1
        for text, prompt in zip(texts, prompts, strict=True):
            assert text.tokens[len(prompt) :] == [choice.token for choice in text.choices]
        return [text.tokens[: len(prompt) + 24] for text, prompt in zip(texts, prompts, strict=True)], steps

    plain, steps = generated(RoundRunner(engines[0]))
    assert steps == 24
    speculative, fewer = generated(RoundRunner(engines[0], engines[1], growth))
    assert speculative == plain
    assert fewer < steps


NEWER = """
from torch import nn
class Transformer(nn.Module):
    def forward(self, mask, idx, input_pos=None): ...
"""
OLDER = """
from dataclasses import dataclass
import torch
from torch import nn
@dataclass
class ModelArgs:
    block_size: int; vocab_size: int; n_layer: int; n_head: int; n_local_heads: int; dim: int
    intermediate_size: int; norm_eps: float; rope_base: float
def weight(outputs, inputs):
    return nn.Linear(inputs, outputs, bias=False)
class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
class Layer(nn.Module):
    def __init__(self, it):
        super().__init__()
        head = it.dim // it.n_head
        self.attention, self.feed_forward = nn.Module(), nn.Module()
        self.attention.wqkv = weight(it.dim + 2 * it.n_local_heads * head, it.dim)
        self.attention.wo = weight(it.dim, it.dim)
        self.feed_forward.w1, self.feed_forward.w3 = (weight(it.intermediate_size, it.dim) for _ in range(2))
        self.feed_forward.w2 = weight(it.dim, it.intermediate_size)
        self.attention_norm, self.ffn_norm = Norm(it.dim), Norm(it.dim)
class Transformer(nn.Module):
    def __init__(self, it):
        super().__init__()
        self.tok_embeddings = nn.Embedding(it.vocab_size, it.dim)
        self.layers = nn.ModuleList(Layer(it) for _ in range(it.n_layer))
        self.norm, self.output = Norm(it.dim), weight(it.vocab_size, it.dim)
        self.seen = []
    def setup_caches(self, max_batch_size, max_seq_length):
        self.most = max_batch_size
    def forward(self, idx, input_pos=None):
        assert len(idx) == self.most and idx.shape[1] == len(input_pos)
        return self.output(self.tok_embeddings(idx))
"""


@pytest.mark.parametrize(("model", "refused"), [(OLDER, False), (NEWER, True)])
def test_a_peer_s_model_takes_padded_weights_or_is_refused(
    model: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(model)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "model", raising=False)
    config = read_config(MODELS / "target")
    shape = replace(known_shape("tiny", config), heads=8, kv_heads=4)  # as wide as the stream, which it asks for
    weights = PaddedWeights(Weights(MODELS / "target"), config, shape)

    def step() -> float:
        return gpt_fast.step_seconds(
            tmp_path, weights, weights.config, device="cpu", dtype="float32", prompts=[[1, 2], [3, 4]], steps=3,
            compiled=False,
        )  # fmt: skip

    if refused:
        with pytest.raises(ConfigError, match="newer than what is known"):
            step()
    else:
        assert 0.0 < step() < 5.0
    monkeypatch.delitem(sys.modules, "model", raising=False)


def test_prompts_have_one_length_and_differ(tmp_path: Path) -> None:
    run = GpuRun(
        "cpu", "float32", "off", (1.0,), (1,), {}, 70, 8, 1, None, MODELS, MODELS.parent / "examples" / "held_out.jsonl"
    )
    prompts = run.prompts_of(5)
    assert [len(prompt) for prompt in prompts] == [70] * 5
    assert len({tuple(prompt) for prompt in prompts}) == 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would take minutes")
async def test_the_bench_runs_the_suite_and_prints_its_results() -> None:
    results = BenchResults()
    printed: list[str] = []
    options: Any = SimpleNamespace(peers={}, models=MODELS)
    await run_gpu(options, results, printed.append)
    assert results.gpu == [gpu.NOTHING]
    assert printed
    screen = Console(file=io.StringIO(), width=400)
    print_tables(screen, results)
    assert gpu.NOTHING in screen.file.getvalue()  # type: ignore[attr-defined]
