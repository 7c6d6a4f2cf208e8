"""A speculator's card: it names the target of the training, and another target is recognized by it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.checkpoints.model_card import ModelCard, check_card, read_card, weights_digest, write_card
from outrider.engine.checkpoints.padding import pad_checkpoint
from outrider.errors import CheckpointError, ConfigError

TARGET, MID = Path("models/target"), Path("models/mid")


def card(target: Path = TARGET) -> ModelCard:
    return ModelCard(
        kind="drafter",
        target=target.name,
        target_digest=weights_digest(target),
        tokenizer_digest="00",
        objective="agreement",
        tokens=1_000_000,
        seconds=12.5,
        acceptance={"0": 3.5, "1": 2.25},
        settings={"rate": 0.001},
    )


def test_a_written_card_is_read_back_unchanged(tmp_path: Path) -> None:
    assert read_card(tmp_path) is None
    write_card(tmp_path, card())
    assert read_card(tmp_path) == card()
    page = (tmp_path / "README.md").read_text()
    assert "base_model" in page
    assert "| acceptance length at temperature 1 | 2.25 |" in page


def test_further_fields_of_a_newer_card_are_ignored(tmp_path: Path) -> None:
    write_card(tmp_path, card())
    path = tmp_path / "outrider.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"more": 1}))
    assert read_card(tmp_path) == card()
    path.write_text('{"kind": "drafter"}')
    with pytest.raises(CheckpointError, match=r"outrider.json: is no speculator's card, it lacks .*target_digest"):
        read_card(tmp_path)


def test_the_digest_is_of_the_weights_and_not_of_their_files(tmp_path: Path) -> None:
    spread, changed = tmp_path / "spread", tmp_path / "changed"
    tensors = load_file(TARGET / "model.safetensors")
    for folder in (spread, changed):
        shutil.copytree(TARGET, folder)
    (spread / "model.safetensors").unlink()
    half = len(tensors) // 2
    files = {"a.safetensors": list(tensors)[:half], "b.safetensors": list(tensors)[half:]}
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, spread / file)
    index = {name: file for file, names in files.items() for name in names}
    (spread / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    tensors["model.norm.weight"][0] += 1.0
    save_file(tensors, changed / "model.safetensors")
    assert weights_digest(spread) == weights_digest(TARGET)
    assert len({weights_digest(folder) for folder in (TARGET, MID, changed)}) == 3


def test_a_padded_target_keeps_its_digest_so_its_speculators_fit(tmp_path: Path) -> None:
    pad_checkpoint(TARGET, tmp_path / "padded", parameters=9_000_000)
    assert weights_digest(tmp_path / "padded") == weights_digest(TARGET)


def test_a_speculator_of_another_target_is_refused(tmp_path: Path) -> None:
    check_card(tmp_path, [TARGET])  # it has no card
    write_card(tmp_path, card())
    check_card(tmp_path, [MID, TARGET])
    with pytest.raises(ConfigError, match="was trained for target, whose weights are others than those of models/mid"):
        check_card(tmp_path, [MID])


def test_tensors_of_any_type_have_a_digest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    tensors = {"half": torch.ones(2, 2, dtype=torch.float16), "one": torch.tensor(1.0), "none": torch.zeros(0, 3)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert len(weights_digest(tmp_path)) == 32
