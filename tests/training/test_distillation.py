"""Trainings bring drafters nearer to their target, go on where they stopped, and keep what was good."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.engine.checkpoints.model_card import read_card, weights_digest
from outrider.engine.loading import load_engine
from outrider.errors import CheckpointError, ConfigError
from outrider.training.data.vocabulary import make_tokenizer
from outrider.training.objectives import NAMES
from outrider.training.recipe import DrafterRecipe, TokenizerRecipe
from tests.full_disk import small_disk
from tests.training.family import PAGES, SHAPE, begin, recipe, train


def weights(output: Path) -> dict[str, torch.Tensor]:
    """In float32, as the run keeps them."""
    return load_file(output.with_name(output.name + ".run") / "state" / "model.safetensors")


def figures(output: Path) -> list[dict[str, Any]]:
    path = output.with_name(output.name + ".run") / "figures.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def timeless(output: Path) -> list[dict[str, Any]]:
    return [
        {name: it for name, it in line.items() if name not in ("seconds", "tokens_per_s")} for line in figures(output)
    ]


@pytest.fixture(scope="module")
def taught(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that learned for a while."""
    output = tmp_path_factory.mktemp("taught") / "drafter"
    train(recipe(target, output, tokens=120 * 256, batch=8, learning_rate=1e-2, measure_steps=40, text_weight=0.0))
    return output


def test_a_drafter_approaches_its_target(taught: Path) -> None:
    lines = figures(taught)
    assert [line["step"] for line in lines] == [0, 40, 80, 120]
    assert lines[-1]["loss"] < lines[1]["loss"]
    for temperature in ("0", "1"):
        assert lines[-1]["acceptance"][temperature] > lines[0]["acceptance"][temperature] + 0.05
    assert lines[-1]["tokens"] == 120 * 256


def test_a_trained_drafter_loads_and_describes_itself(taught: Path, target: Path) -> None:
    engine = load_engine(taught, dtype="bfloat16", slots=1, threads=1)
    assert (engine.vocabulary, engine.context) == (300, 128)
    assert all(tensor.dtype == torch.bfloat16 for tensor in load_file(taught / "model.safetensors").values())
    assert (taught / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()
    assert {path.name for path in taught.iterdir()} > {"tokenizer_config.json", "generation_config.json", "README.md"}
    card = read_card(taught)
    assert card is not None
    assert (card.kind, card.target, card.objective, card.tokens) == ("drafter", "target", "agreement", 120 * 256)
    assert card.target_digest == weights_digest(target)
    assert card.tokenizer_digest == engine.tokenizer_digest.hex()
    assert card.acceptance == figures(taught)[-1]["acceptance"]
    assert card.settings["layers"] == [0, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"objective": "agreement", "on_policy": 0.5, "continuation": 8, "accumulate": 2, "tokens": 16 * 256},
        {"objective": "text", "layers": (), **SHAPE},
    ],
)
def test_an_interrupted_training_ends_with_the_weights_of_an_uninterrupted_one(
    target: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    train(recipe(target, tmp_path / "whole", **changes))
    train(recipe(target, tmp_path / "parts", **changes), steps=5)
    train(recipe(target, tmp_path / "parts", **changes), steps=11)
    last = train(recipe(target, tmp_path / "parts", **changes))
    assert last.resumed
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (
        tmp_path / "parts" / "model.safetensors"
    ).read_bytes()
    ours, theirs = timeless(tmp_path / "whole"), timeless(tmp_path / "parts")
    assert [line["step"] for line in theirs] == [0, 5, 8, 11, 16]
    assert ours[-1]["acceptance"] == theirs[-1]["acceptance"]
    assert ours[-1]["held_out_loss"] == theirs[-1]["held_out_loss"]


def test_repeated_steps_leave_no_duplicate_lines(target: Path, tmp_path: Path) -> None:
    settings = recipe(target, tmp_path / "out", measure_steps=2)
    training = begin(settings)
    for now in training.run():
        if now.step == 3:
            training.save()
        if now.step == 8:
            break  # as a kill leaves it
    train(settings)
    assert [line["step"] for line in figures(tmp_path / "out")] == [0, 2, 3, 4, 6, 8, 10, 12, 14, 16]


def test_a_finished_training_is_finished(target: Path, tmp_path: Path) -> None:
    settings = recipe(target, tmp_path / "out")
    train(settings)
    before = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    again = train(settings)
    assert again.progress.step == 16
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == before


def test_a_training_may_end_sooner_than_it_was_begun_for(target: Path, tmp_path: Path) -> None:
    begun = train(recipe(target, tmp_path / "out", minutes=60), steps=2)
    assert begun.progress.spent < 1.0
    resumed = begin(recipe(target, tmp_path / "out", minutes=begun.progress.seconds / 61))
    assert (resumed.progress.step, resumed.progress.spent) == (2, 1.0)


def test_a_training_does_not_resume_with_other_settings_or_texts(target: Path, tmp_path: Path) -> None:
    train(recipe(target, tmp_path / "out"), steps=2)
    with pytest.raises(ConfigError, match=r"begun with batch = 4, not 8; give the same again .*another --output"):
        begin(recipe(target, tmp_path / "out", batch=8, save_minutes=1))
    (tmp_path / "other.txt").write_text("other words\n" * 2000, encoding="utf-8")
    with pytest.raises(ConfigError, match="begun with texts = "):
        begin(recipe(target, tmp_path / "out", text=(str(tmp_path / "other.txt"),)))
    (tmp_path / "out.run" / "state" / "moments.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"state: cannot be read .*remove it, and begin anew"):
        begin(recipe(target, tmp_path / "out"))


def test_a_folder_with_other_contents_is_not_replaced(target: Path, tmp_path: Path) -> None:
    digest = weights_digest(target)
    with pytest.raises(ConfigError, match=r"target: is there already, .* give another --output"):
        begin(recipe(target, target))
    assert weights_digest(target) == digest
    with pytest.raises(ConfigError, match="target: is there already"):
        make_tokenizer(TokenizerRecipe(text=(str(PAGES),), output=target))
    assert not target.with_name("target.run").exists()
    (tmp_path / "empty").mkdir()
    begin(recipe(target, tmp_path / "empty"))


def test_a_training_that_runs_away_ends_and_leaves_the_last_good_one(target: Path, tmp_path: Path) -> None:
    train(recipe(target, tmp_path / "out", learning_rate=0.9, save_steps=1, warm_up=0, objective="text"), steps=1)
    training = begin(recipe(target, tmp_path / "out", learning_rate=0.9, save_steps=1, warm_up=0, objective="text"))
    with torch.no_grad():
        next(training.student.parameters()).fill_(math.nan)
    with pytest.raises(ConfigError, match=r"the loss is no number any more at step 2; .* smaller one than 0\.9"):
        list(training.run())
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "out").values())


def test_a_gradient_that_is_no_number_is_told_from_a_loss_that_is_none(target: Path, tmp_path: Path) -> None:
    training = begin(recipe(target, tmp_path / "out"))
    next(training.student.parameters()).register_hook(lambda slopes: slopes * math.nan)
    with pytest.raises(ConfigError, match="objective: the gradient is no number at step 1, although the loss is one"):
        list(training.run())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small one, which holds a few of what the tests save."""
    with small_disk(tmp_path / "disk", "2m") as folder:
        yield folder


def test_a_full_disk_ends_a_training_and_leaves_the_last_good_one(target: Path, disk: Path) -> None:
    settings = recipe(target, disk / "out", save_steps=4)
    full = disk / "full"
    steps = begin(settings).run()
    assert [next(steps).step for _ in range(6)][-1] == 6
    left = os.statvfs(disk)
    with full.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, left.f_bavail * left.f_frsize - 8192)
    with pytest.raises(
        CheckpointError, match=r"cannot be written: .*No space left.*what was saved there last is intact"
    ):
        list(steps)
    load_engine(disk / "out", dtype="bfloat16", slots=1, threads=1)
    assert not [path for path in disk.rglob("*") if path.name.startswith(".")]
    full.unlink()
    again = begin(settings)
    assert again.progress.step == 4
    assert [now.step for now in again.run()][-1] == 16


@pytest.mark.parametrize("name", NAMES)
def test_every_objective_trains(name: str, target: Path, tmp_path: Path) -> None:
    settings = recipe(target, tmp_path / "out", objective=name, on_policy=0.5, continuation=8, learning_rate=1e-2)
    train(settings)
    first, *_, last = figures(settings.output)
    assert last["held_out_loss"] < first["held_out_loss"]


def test_recipes_accept_every_objective() -> None:
    known = DrafterRecipe.model_json_schema()["properties"]["objective"]["enum"]
    assert set(known) == {"text", *NAMES}


def test_an_interrupted_command_saves_and_reports_how_to_resume(target: Path, tmp_path: Path) -> None:
    output = tmp_path / "drafter"
    command = [
        *(sys.executable, "-m", "outrider.cli", "train", "drafter", "--target", str(target), "--text", str(PAGES)),
        *("--pattern", "*.md", "--layers", "0,2", "--window", "32", "--batch", "4", "--threads", "1"),
        *("--precision", "float32", "--tokens", "100M", "--measure-steps", "1", "--output", str(output)),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        path = tmp_path / "drafter.run" / "figures.jsonl"
        while not (path.exists() and len(path.read_text(encoding="utf-8").splitlines()) > 3):
            assert process.poll() is None
            signal.sigtimedwait([], 0.05)
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.search(r"outrider train: training, step \d+ · .* tokens/s · \d+ min left", printed)
    assert "the same command goes on from there" in printed
    load_engine(output, dtype="bfloat16", slots=1, threads=1)
    stood = json.loads((tmp_path / "drafter.run" / "state" / "state.json").read_text(encoding="utf-8"))["step"]
    assert f"stopped at step {stood}, " in printed
    again = begin(recipe(target, output, layers=(0, 2), tokens=100_000_000, warm_up=0.03, learning_rate=1e-3))
    assert again.progress.step == stood >= 3


@pytest.mark.long
def test_two_processes_learn_the_weights_of_one_with_twice_the_batch(target: Path, tmp_path: Path) -> None:
    shared = (
        "--target",
        target,
        "--text",
        PAGES,
        "--pattern",
        "*.md",
        "--layers",
        "0,2",
        "--window",
        "32",
        "--threads",
        "1",
    )
    command = [*map(str, shared), "--precision", "float32", "--tokens", "2K", "--warm-up", "0.1", "--accumulate", "2"]
    alone = [sys.executable, "-m", "outrider.cli", "train", "drafter", *command, "--batch", "4"]
    together = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "outrider.cli", "train", "drafter", *command, "--batch", "2"),
    ]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    for run, name in ((alone, "one"), (together, "two")):
        done = subprocess.run(
            [*run, "--output", str(tmp_path / name)], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("outrider train: wrote") == 1
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert all(torch.allclose(one[name], two[name], atol=1e-4) for name in one)
    assert figures(tmp_path / "one")[-1]["step"] == figures(tmp_path / "two")[-1]["step"] == 8
