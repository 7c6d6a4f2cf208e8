"""Students begin as what they are made of, and what cannot teach or learn is refused with the reason."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.settings import EngineSettings
from outrider.errors import CheckpointError, ConfigError, OutriderError, TokenizerMismatch
from outrider.training.data.corpus import Vocabulary
from outrider.training.recipe import DrafterRecipe
from outrider.training.tasks.student_init import load, make_student
from tests.engine.families import make_family
from tests.engine.small_checkpoints import prompt
from tests.training.family import SHAPE, TARGET, begin, make_target, recipe

TEXT = torch.randint(0, 300, (1, 40), generator=torch.Generator().manual_seed(1))


def student(settings: DrafterRecipe) -> Any:
    assert settings.target is not None
    return make_student(settings, load(settings.target, "float32"), Vocabulary.read(settings.target))


def test_a_student_with_all_layers_equals_the_target(target: Path, tmp_path: Path) -> None:
    made = student(recipe(target, tmp_path, layers=(0, 1, 2))).eval()
    with torch.no_grad():
        assert torch.equal(made(TEXT).logits, load(target, "float32").model(TEXT).logits)


def test_a_student_with_some_layers_equals_the_engine_that_skips_the_others(target: Path, tmp_path: Path) -> None:
    made = student(recipe(target, tmp_path, layers=(0, 2))).eval()
    engine = CpuEngine.load(target, EngineSettings(dtype="float32", skip=(1,), slots=1, threads=1))
    with torch.no_grad():
        expected = made(TEXT).logits[0].numpy()
    assert abs(engine.forward([prompt(0, TEXT[0].numpy(), wanted=40)]) - expected).max() < 1e-4


def test_layers_of_another_family_are_taken_too(tmp_path: Path) -> None:
    folder = make_family(tmp_path / "gpt2", "gpt2")
    found = load(folder, "float32")
    vocabulary = Vocabulary.read(TARGET)
    made = make_student(recipe(folder, tmp_path, layers=(0,)), found, vocabulary).eval()
    kept = {name: tensor for name, tensor in made.state_dict().items() if ".h." in name}
    assert kept
    assert all(torch.equal(tensor, found.model.state_dict()[name]) for name, tensor in kept.items())


def test_a_shape_is_random_by_its_seed_and_has_the_targets_tokens(target: Path, tmp_path: Path) -> None:
    one, same, other = (
        student(recipe(target, tmp_path, layers=(), **SHAPE, kv_heads=1, seed=seed)).eval()(TEXT).logits
        for seed in (1, 1, 2)
    )
    assert one.shape == (1, 40, 300)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_student_that_starts_from_a_checkpoint_equals_it(target: Path, tmp_path: Path) -> None:
    made = student(recipe(target, tmp_path, layers=(), start=target)).eval()
    with torch.no_grad():
        assert torch.equal(made(TEXT).logits, load(target, "float32").model(TEXT).logits)


def damaged(target: Path, folder: Path) -> Path:
    shutil.copytree(target, folder)
    (folder / "model.safetensors").write_bytes((target / "model.safetensors").read_bytes()[:5000])
    return folder


def small(folder: Path) -> Path:
    """A checkpoint with the same tokenizer, and with fewer tokens in its vocabulary."""
    made = make_target(folder)
    model = load(made, "float32").model
    model.resize_token_embeddings(290)
    model.save_pretrained(made)
    return made


@pytest.mark.parametrize(
    ("changes", "error", "problem"),
    [
        ({"layers": (0, 3)}, ConfigError, "the target has 3, counted from 0; it has no layer 3"),
        ({"window": 256}, ConfigError, "window: 256 is more than the drafter's context of 128 tokens"),
        ({"layers": (), **SHAPE, "context": 256, "window": 256}, ConfigError, "the target's context of 128"),
        ({"layers": (), **SHAPE, "kv_heads": 3}, ConfigError, "kv_heads: 3 must divide the 2 heads"),
        ({"layers": (), **SHAPE, "head_dim": 5}, ConfigError, "head_dim: 5 must be even"),
        ({"layers": (), "start": TARGET}, TokenizerMismatch, "target: its tokenizer is not the target's"),
        ({"target": Path("nowhere")}, CheckpointError, "nowhere: no such folder"),
        ({"text": ("nowhere.txt",)}, ConfigError, r"nowhere\.txt: no such file or folder"),
    ],
)
def test_an_impossible_training_is_refused_at_once(
    target: Path, tmp_path: Path, changes: dict[str, Any], error: type[OutriderError], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        begin(recipe(target, tmp_path / "out", **changes))
    assert not (tmp_path / "out.run").exists()


def test_weights_that_are_broken_or_have_other_tokens_are_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"broken: .*transformers cannot load it"):
        begin(recipe(damaged(target, tmp_path / "broken"), tmp_path / "out"))
    with pytest.raises(TokenizerMismatch, match=r"has 290 tokens, the target's 300; .* the same number"):
        begin(recipe(target, tmp_path / "out", layers=(), start=small(tmp_path / "small")))
    with pytest.raises(TokenizerMismatch, match=r"its tokenizer has 300 tokens, the model 290; .* belong together"):
        begin(recipe(tmp_path / "small", tmp_path / "out"))
    assert not (tmp_path / "out.run").exists()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tokens": None}, "tokens or minutes"),
        ({"target": None, "layers": ()}, "objective agreement needs a target"),
        ({"tokenizer": Path("t")}, "either a target, whose tokenizer is taken, or a tokenizer"),
        ({"width": 64}, "one of layers of the target, start"),
        ({"layers": ()}, "one of layers of the target, start"),
        ({"on_policy": 0.5, "objective": "text"}, "a target scores the text"),
        ({"on_policy": 0.5, "continuation": 32}, r"below the window \(32\)"),
    ],
)
def test_incompatible_settings_are_named(target: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        recipe(target, Path("out"), **changes)
