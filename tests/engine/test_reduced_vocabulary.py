"""A drafter whose head has some of the ids: their logits are those of the whole head, and no other id is drafted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from outrider.core.sampling.noise import Draw, generation_base, gumbel_row
from outrider.engine.checkpoints.checkpoint import Weights, read_config
from outrider.engine.checkpoints.gguf.header import read_gguf
from outrider.engine.checkpoints.gguf.recipes import recipe
from outrider.engine.checkpoints.gguf.writer import EMBEDDING, write_gguf
from outrider.engine.checkpoints.model_config import DRAFT_IDS
from outrider.engine.checkpoints.padding import pad_checkpoint
from outrider.engine.gpu import DeviceEngine
from outrider.engine.interface.engine import Dtype
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.loading import load_engine
from outrider.engine.tensor_parallel.sharding import Shard
from outrider.engine.transformers.reduced_head import NEVER
from outrider.errors import CheckpointError, ConfigError
from tests.engine.gpu.taped import DEVICE
from tests.engine.small_checkpoints import MODELS, keep_ids, make_checkpoint, prompt

IDS = [0, 3, 4, 17, 30, 31, 49]
TOKENS = np.arange(2, 42)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("whole") / "model", "untied-wide-heads")


@pytest.fixture(scope="module")
def reduced(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return keep_ids(whole, tmp_path_factory.mktemp("reduced") / "model", IDS)


def with_config(folder: Path, ids: object) -> Path:
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(raw | {DRAFT_IDS: ids}), encoding="utf-8")
    return folder


def logits(path: Path, dtype: Dtype) -> NDArray[np.float32]:
    engine = load_engine(path, dtype=dtype, slots=2, rows=64, threads=2)
    engine.sample([prompt(1, TOKENS)], [Draw(1, 1.0)], 4)  # its buffers are used again
    return engine.forward([prompt(0, TOKENS)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_its_logits_are_those_of_the_whole_head(dtype: Dtype, whole: Path, reduced: Path) -> None:
    every, some = logits(whole, dtype), logits(reduced, dtype)
    assert np.array_equal(some[:, IDS], every[:, IDS])
    assert np.isneginf(np.delete(some, IDS, 1)).all()


def test_a_gguf_file_keeps_the_ids(tmp_path: Path) -> None:
    reduced = keep_ids(MODELS / "drafter", tmp_path / "reduced", IDS)
    file, config = tmp_path / "drafter.gguf", read_config(reduced)
    write_gguf(reduced, file, recipe("F32", config))
    assert read_config(file).draft_ids == config.draft_ids == tuple(IDS)
    assert np.allclose(logits(file, "float32"), logits(reduced, "float32"), atol=1e-5)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
def test_a_gguf_file_has_a_row_once_that_all_other_ids_share(kind: str, tmp_path: Path) -> None:
    reduced = keep_ids(MODELS / "drafter", tmp_path / "reduced", IDS)
    config = read_config(reduced)
    write_gguf(reduced, tmp_path / "every.gguf", recipe(kind, config))
    tensors = load_file(reduced / "model.safetensors")
    others = np.delete(np.arange(config.vocabulary), IDS)
    tensors[EMBEDDING][others] = tensors[EMBEDDING][others].mean(0)
    save_file(tensors, reduced / "model.safetensors", metadata={"format": "pt"})
    write_gguf(reduced, file := tmp_path / "once.gguf", recipe(kind, config))
    assert read_gguf(file).tensors["token_embd.weight"].shape == (len(IDS) + 1, config.width)
    assert read_config(file) == read_config(tmp_path / "every.gguf")
    every, once = (
        Weights(tmp_path / f"{name}.gguf").array(EMBEDDING, config.vocabulary, config.width)
        for name in ("every", "once")
    )
    assert np.array_equal(once[IDS], every[IDS])
    assert (once[others] == once[others[0]]).all()
    if kind == "F32":
        assert np.array_equal(once, tensors[EMBEDDING].float().numpy())
        assert np.allclose(logits(file, "float32"), logits(reduced, "float32"), atol=1e-5)


def test_a_row_that_stands_for_more_ids_than_there_are_tokens_is_refused(tmp_path: Path) -> None:
    reduced = keep_ids(MODELS / "drafter", tmp_path / "reduced", IDS)
    config = read_config(reduced)
    weights = load_file(reduced / "model.safetensors")
    weights[EMBEDDING][:] = 1.0
    save_file(weights, reduced / "model.safetensors", metadata={"format": "pt"})
    write_gguf(reduced, file := tmp_path / "drafter.gguf", recipe("F32", config))
    size, key = config.vocabulary, b"vocab_size\x04\x00\x00\x00"
    content = file.read_bytes()
    assert content.count(key + size.to_bytes(4, "little")) == 1
    file.write_bytes(content.replace(key + size.to_bytes(4, "little"), key + (size << 16).to_bytes(4, "little")))
    with pytest.raises(CheckpointError, match=f"has {size} tokens and an embedding of {size << 16} rows"):
        read_config(file)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_best_tokens_are_those_of_its_ids(temperature: float, reduced: Path) -> None:
    engine = load_engine(reduced, dtype="float32", slots=1, rows=64, threads=1)
    draw = Draw(generation_base(5, 0), temperature)
    for _ in range(2):
        found = engine.sample([prompt(0, TOKENS)], [draw], 4)
        for row, place in enumerate(range(1, len(TOKENS) + 1)):
            scores = found.row(row).astype(np.float64)
            if temperature:
                scores = scores / temperature + gumbel_row(5, 0, place, len(scores))
            best = found.best(row)
            assert best is not None
            assert best.tokens.tolist() == sorted(IDS, key=lambda id_: -scores[id_])[:4]


@pytest.mark.parametrize(
    ("ids", "allowed"),
    [
        ([], "ascending"),
        ([3, 2], "ascending"),
        ([1, 50], "below 50"),
        ([-1, 2], "below 50"),
        ("all", "a list"),
        ([1.5], "a list"),
    ],
)
def test_ids_that_are_none_are_refused(ids: object, allowed: str, reduced: Path, tmp_path: Path) -> None:
    shutil.copytree(reduced, tmp_path / "bad")
    with pytest.raises(CheckpointError, match=f"{DRAFT_IDS}.*{allowed}"):
        read_config(with_config(tmp_path / "bad", ids))


def test_a_head_of_other_rows_is_refused(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "bad")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has shape"):
        logits(with_config(tmp_path / "bad", IDS), "float32")


def test_it_is_not_padded(reduced: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="pad the target"):
        pad_checkpoint(reduced, tmp_path / "padded", parameters=20_000_000)


def test_transformers_runs_it(whole: Path, reduced: Path, caplog: pytest.LogCaptureFixture) -> None:
    engines = [load_engine(it, backend="transformers", dtype="float32", slots=1, rows=64) for it in (whole, reduced)]
    every, some = (engine.forward([prompt(0, TOKENS)]) for engine in engines)
    assert np.allclose(some[:, IDS], every[:, IDS], atol=1e-5)
    assert (np.delete(some, IDS, 1) == NEVER).all()
    assert "MISMATCH" not in caplog.text


def test_ranks_do_not_share_it(reduced: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel"):
        Shard(0, 2).config(read_config(reduced))


def test_a_device_has_the_same_logits(whole: Path, reduced: Path) -> None:
    settings = EngineSettings(device=DEVICE, dtype="float32", slots=1, rows=64)
    every, some = (DeviceEngine.load(it, settings).forward([prompt(0, TOKENS)]) for it in (whole, reduced))
    assert np.allclose(some[:, IDS], every[:, IDS], atol=1e-5)
    assert np.isneginf(np.delete(some, IDS, 1)).all()
