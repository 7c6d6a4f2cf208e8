"""`outrider describe` prints what a checkpoint or a server is, and what is wrong with a target that is neither."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from typer.testing import CliRunner

from bench.peers.gguf import write_gguf
from outrider._native import instruction_sets
from outrider.cli.main import app
from outrider.cli.servers import describe as describing
from outrider.engine.checkpoints.checkpoint import read_tokenizer_digest
from outrider.engine.checkpoints.model_card import ModelCard, weights_digest, write_card
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.engine import Engine
from outrider.engine.interface.settings import EngineSettings
from outrider.rpc.server import serving
from outrider.v1 import (
    drafter_pb2,
    drafter_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    verifier_pb2,
    verifier_pb2_grpc,
)
from tests.drafter.other_tokenizer import MODELS, make_other
from tests.engine.families import make_family
from tests.engine.small_checkpoints import make_checkpoint

Register = Callable[[grpc.aio.Server], Sequence[str]]
DIGEST = bytes(range(16))


class Verifier(verifier_pb2_grpc.VerifierServicer):
    async def Describe(self, request: Any, context: Any) -> verifier_pb2.VerifierDescription:
        return verifier_pb2.VerifierDescription(
            worker_id="verifier-x",
            model="large",
            tokenizer_digest=DIGEST,
            vocabulary=4096,
            context=1024,
            slots=8,
            sessions=3,
            warm=2,
            drafters=1,
            steps=77,
            dtype="bfloat16",
            numerics="invariant",
            parameters=150_000_000,
            refused_frames=5,
            step_costs=[verifier_pb2.StepCost(tokens=2, microseconds=12_300)],
        )


class Drafter(drafter_pb2_grpc.DrafterServicer):
    async def Describe(self, request: Any, context: Any) -> drafter_pb2.DrafterDescription:
        return drafter_pb2.DrafterDescription(
            worker_id="drafter-x", model="small", slots=8, sessions=1, levels=40, nodes=123, refused_frames=6
        )


class Router(inference_pb2_grpc.InferenceServicer):
    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        model = inference_pb2.Model(name="large", context=1024, vocabulary=4096, verifiers=2, drafters=3)
        return inference_pb2.ListModelsResponse(models=[model])


def verifier(server: grpc.aio.Server) -> list[str]:
    verifier_pb2_grpc.add_VerifierServicer_to_server(Verifier(), server)
    return ["outrider.v1.Verifier"]


def drafter(server: grpc.aio.Server) -> list[str]:
    drafter_pb2_grpc.add_DrafterServicer_to_server(Drafter(), server)
    return ["outrider.v1.Drafter"]


def router(server: grpc.aio.Server) -> list[str]:
    inference_pb2_grpc.add_InferenceServicer_to_server(Router(), server)
    return ["outrider.v1.Inference"]


async def described(target: str) -> tuple[int | None, str, str]:
    """Exit status, stdout with runs of blanks as one, and stderr, of the command as its own process."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider.cli", "describe", target),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"COLUMNS": "120", "PATH": "/usr/bin:/bin"},
    )
    out, err = await process.communicate()
    return process.returncode, re.sub(" +", " ", out.decode()), err.decode()


@pytest.mark.parametrize(
    ("register", "expected"),
    [
        (
            verifier,
            (
                "verifier verifier-x",
                "model large",
                "tokenizer digest 000102030405060708090a0b0c0d0e0f",
                "parameters 150,000,000",
                "weights bfloat16",
                "numerics invariant",
                "sessions 3 of 8, and 2 warm",
                "steps 77",
                "step over n tokens 2: 12.3 ms",
                "refused frames 5",
            ),
        ),
        (drafter, ("drafter drafter-x", "model small", "sessions 1 of 8", "nodes sent 123", "refused frames 6")),
        (router, ("router of 1 model", "model large", "context 1,024 tokens", "served by 2 verifiers and 3 drafters")),
    ],
    ids=["verifier", "drafter", "router"],
)
async def test_a_server_is_recognized_and_described(register: Register, expected: tuple[str, ...]) -> None:
    async with serving("127.0.0.1:0", register) as address:
        status, out, err = await described(address)
    assert (status, err) == (0, "")
    lines = [line.strip() for line in out.splitlines()]
    for line in expected:
        assert line in lines


async def test_a_server_of_another_kind_is_refused() -> None:
    async with serving("127.0.0.1:0", lambda server: []) as address:
        status, out, err = await described(address)
    assert (status, out) == (2, "")
    assert err == f"outrider: the server at {address} is no verifier, drafter or router of Outrider\n"


def test_a_checkpoint_is_described_and_measured(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")
    result = CliRunner().invoke(app, ["describe", str(folder), "--dtype", "float32"], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.stderr
    text = re.sub(" +", " ", result.stdout)
    for words in ("family qwen3", "layers 3 of width 64", "vocabulary 131", "context 256 tokens", "float32, 1 thread)"):
        assert words in text
    assert f"computed by compiled kernels ({instruction_sets()[0]})" in text
    rows = re.findall(r"^ (\d+) (\d+\.\d\d) *$", text, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [2, 4, 8, 16, 32, 64]
    assert result.stdout.splitlines()[-1] == f"describe: trees=yes decode_ms={rows[0][1]}"
    result = CliRunner().invoke(app, ["describe", str(folder), "--kv-dtype", "int8"], env={"COLUMNS": "100"})
    assert "auto with KV in int8, 1 thread)" in re.sub(" +", " ", result.stdout)


def test_a_slow_model_is_measured_in_fewer_rounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[int] = []

    def measure_costs(self: Engine, tokens: Sequence[int], context: int, repeats: int) -> list[tuple[int, float]]:
        asked.append(repeats)
        return [(count, 0.1 / len(asked)) for count in tokens]

    monkeypatch.setattr(CpuEngine, "measure_costs", measure_costs)
    monkeypatch.setattr(describing, "MEASURING_S", -1.0)
    result = CliRunner().invoke(app, ["describe", str(make_checkpoint(tmp_path, "qwen3"))])
    assert (asked, result.stdout.splitlines()[-1]) == ([3], "describe: trees=yes decode_ms=100.00")


def test_a_gguf_file_is_described_and_held_against_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "drafter.gguf"
    write_gguf(MODELS / "drafter", file)
    (tmp_path / "drafter").mkdir()
    shutil.copy(MODELS / "drafter" / "tokenizer.json", tmp_path / "drafter")
    result = CliRunner().invoke(app, ["describe", str(file)], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.stderr
    text = re.sub(" +", " ", result.stdout)
    for words in ("family llama", "vocabulary 4,096", read_tokenizer_digest(MODELS / "drafter").hex(), "trees=yes"):
        assert words in text
    result = CliRunner().invoke(app, ["describe", str(file), "--for", str(MODELS / "target")], env={"COLUMNS": "200"})
    assert "drafts_for_it=yes" in result.stdout
    file.write_bytes(file.read_bytes()[:5000])
    result = CliRunner().invoke(app, ["describe", str(file)])
    assert result.exit_code != 0
    assert f"{file}: truncated or corrupt" in result.stderr


def test_describe_prints_why_torch_computes(tmp_path: Path) -> None:
    env = {"COLUMNS": "160", "OUTRIDER_ENGINE": "torch"}
    result = CliRunner().invoke(app, ["describe", str(make_checkpoint(tmp_path)), "--dtype", "float32"], env=env)
    assert result.exit_code == 0, result.stderr
    text = re.sub(" +", " ", result.stdout)
    assert "computed by torch, not by the compiled kernels: OUTRIDER_ENGINE=torch is set" in text
    assert "numerics fast" in text


def test_a_partly_quantized_copy_is_described_with_its_layers_and_weight_type(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    options = ["--dtype", "int8", "--skip", "0", "--skip", "2"]
    result = CliRunner().invoke(app, ["describe", str(folder), *options], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.stderr
    text = re.sub(" +", " ", result.stdout)
    engine = CpuEngine.load(folder, EngineSettings(dtype="int8", skip=(0, 2), slots=1, threads=1))
    for words in (f"parameters {engine.parameters:,}", "layers 1 of 3, of width 64", "weights int8", "int8, 1 thread)"):
        assert words in text
    assert f"weights a pass reads {engine.weight_bytes / 1e6:.1f} MB" in text


@pytest.mark.parametrize(("family", "trees"), [("gpt2", "yes"), ("mamba", "no")])
def test_a_model_run_through_transformers_is_described_with_its_tree_support(
    family: str, trees: str, tmp_path: Path
) -> None:
    folder = make_family(tmp_path, family)
    options = ["--dtype", "float32"]
    result = CliRunner().invoke(app, ["describe", str(folder), *options], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.stderr
    text = re.sub(" +", " ", result.stdout)
    expected = {"yes": "speculation trees, as was tried", "no": "speculation none: its logits over"}[trees]
    for words in (f"family {family}, through transformers", "vocabulary 131", "weights float32", expected):
        assert words in text
    assert re.fullmatch(rf"describe: trees={trees} decode_ms=\d+\.\d\d", result.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("target", "named"),
    [
        ("no-such-folder", "no-such-folder: no such folder; give the folder of a checkpoint"),
        ("tests", "tests/config.json: missing"),
        ("127.0.0.1:1", "no server can be reached at 127.0.0.1:1"),
    ],
)
def test_a_wrong_target_is_named(target: str, named: str) -> None:
    result = CliRunner().invoke(app, ["describe", target])
    assert (result.exit_code, result.stdout) == (2, "")
    assert named in result.stderr


@pytest.mark.parametrize(
    ("drafter", "target", "shown", "last"),
    [
        ("drafter", "target", "drafts for it yes", "drafts_for_it=yes reason="),
        (
            "other",
            "target",
            "drafts for it no: no drafter has",
            "drafts_for_it=no reason=other-tokenizer",
        ),
        ("trained", "target", "drafts for it no: the drafters were", "drafts_for_it=no reason=other-target"),
        ("trained", "drafter", "trained for drafter", "drafts_for_it=yes reason="),
    ],
)
def test_two_checkpoints_are_held_against_each_other(
    drafter: str, target: str, shown: str, last: str, tmp_path: Path
) -> None:
    make_other(tmp_path / "other")
    shutil.copytree(MODELS / "drafter", tmp_path / "trained")
    digests = {"target_digest": weights_digest(MODELS / "drafter"), "tokenizer_digest": ""}
    card = ModelCard("drafter", "drafter", objective="agreement", tokens=1, seconds=1.0, **digests)
    write_card(tmp_path / "trained", card)
    folder = tmp_path / drafter if (tmp_path / drafter).exists() else MODELS / drafter
    options = [str(folder), "--for", str(MODELS / target)]
    result = CliRunner().invoke(app, ["describe", *options], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.stderr
    assert shown in re.sub(" +", " ", result.stdout)
    assert result.stdout.splitlines()[-1] == f"describe: {last}"


def test_a_target_without_a_checkpoint_is_refused() -> None:
    result = CliRunner().invoke(app, ["describe", str(MODELS / "drafter"), "--for", "tests"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "tests/tokenizer.json" in result.stderr
