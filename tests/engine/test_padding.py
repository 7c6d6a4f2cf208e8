"""A padded checkpoint says what the original says, in our engine and in `transformers`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.engine.checkpoint import read_config
from outrider.engine.native import NativeEngine
from outrider.engine.padding import choose_shape, count_parameters, pad_checkpoint
from outrider.errors import CheckpointError
from tests.engine.checkpoints import MODELS, SHAPES, Reference, assert_same, make_checkpoint, prompt

TOKENS = np.random.default_rng(1).integers(0, 50, 90)


def logits(folder: Path, dtype: str = "float32") -> np.ndarray:
    engine = NativeEngine.load(folder, dtype=dtype, slots=1, threads=1)  # type: ignore[arg-type]
    return engine.forward([prompt(0, TOKENS)])


@pytest.mark.parametrize("shape", SHAPES)
def test_padding_changes_no_logit(shape: str, tmp_path: Path) -> None:
    source, padded = make_checkpoint(tmp_path / "source", shape), tmp_path / "padded"
    asked = 5_000_000
    parameters = pad_checkpoint(source, padded, parameters=asked)
    config = read_config(padded)
    assert config.width == 4 * read_config(source).width
    assert config.layers > read_config(source).layers
    assert abs(parameters - asked) < 0.1 * asked
    reference = Reference.load(padded)
    assert parameters == reference.model.num_parameters()
    expected = logits(source)
    assert_same(reference.logits(TOKENS), expected)
    assert_same(logits(padded), expected)


def test_the_padded_target_costs_what_was_asked_and_says_the_same(tmp_path: Path) -> None:
    padded = tmp_path / "padded"
    parameters = pad_checkpoint(MODELS / "target", padded, parameters=30_000_000)
    assert abs(parameters - 30_000_000) < 1_500_000
    assert (padded / "tokenizer.json").read_bytes() == (MODELS / "target" / "tokenizer.json").read_bytes()
    assert (padded / "generation_config.json").exists()
    assert Reference.load(padded).model.dtype == torch.float32
    assert_same(logits(padded), logits(MODELS / "target"))
    # bfloat16 rounds the same values at the same places, but sums them in another order.
    assert np.abs(logits(padded, "bfloat16") - logits(MODELS / "target", "bfloat16")).max() < 0.125


def test_padding_is_deterministic(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    for name in ("first", "second"):
        pad_checkpoint(source, tmp_path / name, parameters=1_000_000)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("millions", [20, 50, 100, 150, 400, 1000])
def test_shapes_are_close_to_the_size_that_is_asked(millions: int) -> None:
    config = read_config(MODELS / "target")
    shape = choose_shape(config, millions * 10**6)
    assert shape is not None
    assert abs(count_parameters(config, shape) - millions * 10**6) < 0.05 * millions * 10**6
    assert 1.0 <= shape.ffn / shape.width <= 5.0


def test_what_cannot_be_padded_is_refused(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    with pytest.raises(CheckpointError, match="parameters already"):
        pad_checkpoint(source, tmp_path / "padded", parameters=1000)
    with pytest.raises(CheckpointError, match="exists already"):
        pad_checkpoint(source, source, parameters=10**6)
    with pytest.raises(CheckpointError, match="no such folder"):
        pad_checkpoint(tmp_path / "nothing", tmp_path / "padded", parameters=10**6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
