"""A padded checkpoint gives the logits of the original, in our engine and in `transformers`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract
from outrider.engine.checkpoints.checkpoint import Weights, read_config
from outrider.engine.checkpoints.padding import (
    PaddedWeights,
    choose_shape,
    count_parameters,
    known_shape,
    pad_checkpoint,
)
from outrider.engine.gpu import DeviceEngine
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.loading import load_engine
from outrider.errors import CheckpointError
from tests.engine.small_checkpoints import MODELS, SHAPES, Reference, assert_same, make_checkpoint, prompt
from tests.full_disk import small_disk

TOKENS = np.random.default_rng(1).integers(0, 50, 90)


def logits(folder: Path, dtype: str = "float32") -> np.ndarray:
    engine = load_engine(folder, dtype=dtype, slots=1, threads=1)  # type: ignore[arg-type]
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


def test_a_padded_target_has_the_requested_size_and_equal_logits(tmp_path: Path) -> None:
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


def test_impossible_paddings_are_refused(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    with pytest.raises(CheckpointError, match="parameters already"):
        pad_checkpoint(source, tmp_path / "padded", parameters=1000)
    with pytest.raises(CheckpointError, match="exists already"):
        pad_checkpoint(source, source, parameters=10**6)
    with pytest.raises(CheckpointError, match="no such folder"):
        pad_checkpoint(tmp_path / "nothing", tmp_path / "padded", parameters=10**6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference target in a known shape: wider by 2, more query heads a KV head, a larger vocabulary, untied."""
    folder = tmp_path_factory.mktemp("shaped") / "tiny"
    pad_checkpoint(MODELS / "target", folder, shape="tiny")
    return folder


@pytest.mark.parametrize(("name", "parameters"), [("llama-3.1-8b", 8_030_261_248), ("llama-3.2-1b", 1_235_814_400)])
def test_known_shapes_have_as_many_parameters_as_the_models(name: str, parameters: int) -> None:
    config = read_config(MODELS / "target")
    assert count_parameters(config, known_shape(name, config)) == parameters


def test_a_checkpoint_in_a_known_shape_gives_equal_logits_and_masks_its_padding(shaped: Path) -> None:
    config, expected = read_config(shaped), logits(MODELS / "target")
    assert (config.width, config.layers, config.group, config.vocabulary, config.unpadded_vocabulary, config.tied) == (
        512, 8, 4, 6000, 4096, False,
    )  # fmt: skip
    ours = logits(shaped)
    assert ours.shape == (len(TOKENS), 6000)
    assert_same(ours[:, :4096], expected)
    assert np.isneginf(ours[:, 4096:]).all()
    reference = Reference.load(shaped).logits(TOKENS)
    assert_same(reference[:, :4096], expected)
    assert np.isfinite(reference[:, 4096:]).all()  # the key is ours alone, as the documentation states


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_checkpoint_in_a_known_shape_gives_equal_tokens(shaped: Path, temperature: float) -> None:
    contract = Contract(seed=3, max_tokens=40, temperature=temperature)
    texts = []
    for folder in (MODELS / "target", shaped):
        engine = load_engine(folder, dtype="float32", slots=1, threads=1)
        text = [5, 6, 7]
        sampler = Sampler(contract, engine.vocabulary, text, 3)
        row = engine.forward([prompt(0, np.array(text))])[-1]
        for _ in range(40):
            text.append(sampler.choose(row).token)
            sampler.extend(text[-1:])
            row = engine.forward([prompt(0, np.array(text[-1:]), len(text) - 1)])[-1]
        texts.append(text)
    assert texts[0] == texts[1]
    assert max(texts[1]) < 4096


def test_padding_a_drafters_vocabulary_changes_no_other_setting(tmp_path: Path) -> None:
    padded = tmp_path / "padded"
    pad_checkpoint(MODELS / "drafter", padded, vocabulary=6000)
    before, after = read_config(MODELS / "drafter"), read_config(padded)
    assert (after.vocabulary, after.unpadded_vocabulary) == (6000, before.vocabulary)
    assert replace(after, vocabulary=before.vocabulary, unpadded_vocabulary=before.unpadded_vocabulary) == before
    larger = logits(padded)
    assert np.array_equal(larger[:, : before.vocabulary], logits(MODELS / "drafter"))
    assert np.isneginf(larger[:, before.vocabulary :]).all()
    with pytest.raises(CheckpointError, match="has a vocabulary of 6000; ask for more than 6000"):
        pad_checkpoint(padded, tmp_path / "again", vocabulary=6000)


def test_weights_need_no_file(shaped: Path) -> None:
    config = read_config(MODELS / "target")
    made = PaddedWeights(Weights(MODELS / "target"), config, known_shape("tiny", config))
    stored = read_config(shaped)
    assert made.config == stored
    loading = {"device": "cpu", "dtype": "float32", "slots": 1}
    engines = (
        DeviceEngine.of(made, made.config, b"", EngineSettings(**loading)),  # type: ignore[arg-type]
        DeviceEngine.load(shaped, EngineSettings(**loading)),  # type: ignore[arg-type]
    )
    first, second = (engine.forward([prompt(0, TOKENS)]) for engine in engines)
    assert (first == second).all()
    assert_same(first[:, :4096], logits(MODELS / "target"))
    assert np.isneginf(first[:, 4096:]).all()
    rows = made.take("model.embed_tokens.weight", 6000, 512, rows=slice(4000, 5000), columns=slice(0, 100))
    assert torch.equal(rows, made.take("model.embed_tokens.weight", 6000, 512)[4000:5000, :100])


def test_large_checkpoints_are_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.engine.checkpoints.padding.FILE_BYTES", 10_000_000)
    pad_checkpoint(MODELS / "drafter", tmp_path / "padded", shape="tiny")
    files = sorted(path.name for path in (tmp_path / "padded").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert all((tmp_path / "padded" / name).stat().st_size < 10_100_000 for name in files)
    assert_same(logits(tmp_path / "padded")[:, :4096], logits(MODELS / "drafter"))
    assert_same(Reference.load(tmp_path / "padded").logits(TOKENS)[:, :4096], logits(MODELS / "drafter"))


def test_a_checkpoint_that_does_not_fit_a_known_shape_is_refused(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "untied-wide-heads")
    with pytest.raises(CheckpointError, match=r"must be one of llama-3\.1-8b"):
        pad_checkpoint(source, tmp_path / "padded", shape="gpt-2")
    with pytest.raises(CheckpointError, match="whose head is its embedding"):
        pad_checkpoint(source, tmp_path / "padded", shape="llama-3.2-1b")
    pad_checkpoint(MODELS / "drafter", tmp_path / "larger", parameters=30_000_000)
    with pytest.raises(CheckpointError, match="does not fit into tiny: its width is 1024"):
        pad_checkpoint(tmp_path / "larger", tmp_path / "padded", shape="tiny")


def test_an_unpadded_vocabulary_above_the_padded_one_is_refused(tmp_path: Path) -> None:
    config = make_checkpoint(tmp_path) / "config.json"
    config.write_text(config.read_text().replace("{", '{"outrider_unpadded_vocabulary": 132,', 1))
    with pytest.raises(CheckpointError, match="outrider_unpadded_vocabulary is 132, must be at most vocab_size"):
        read_config(tmp_path)


def test_a_disk_that_is_too_small_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        with pytest.raises(CheckpointError, match=r"padded: cannot be written .*; is the disk full"):
            pad_checkpoint(MODELS / "drafter", disk / "padded", parameters=20_000_000)
        assert not [*disk.iterdir()]
