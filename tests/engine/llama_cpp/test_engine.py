"""llama.cpp behind our interface computes in trees and batches what a model does alone, and our own engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from outrider.engine.checkpoints.checkpoint import read_config
from outrider.engine.checkpoints.gguf.recipes import recipe
from outrider.engine.checkpoints.gguf.writer import write_gguf
from outrider.engine.interface.engine import Engine
from outrider.engine.llama_cpp import engine as llama_cpp
from outrider.engine.llama_cpp.engine import LlamaCppEngine
from outrider.engine.loading import load_engine
from outrider.errors import CheckpointError, ConfigError
from tests.engine.contract import *  # noqa: F403 what every engine that is not bit for bit the same does
from tests.engine.small_checkpoints import MODELS, Reference, Tree, prompt, random_tokens

SLOTS = 6
DRAFTER = MODELS / "drafter"


def written(folder: Path, to: str) -> Path:
    """The reference drafter as a GGUF file."""
    file = folder / f"drafter-{to}.gguf"
    write_gguf(DRAFTER, file, recipe(to, read_config(DRAFTER)))
    return file


def load(file: Path, slots: int = SLOTS) -> LlamaCppEngine:
    engine = load_engine(file, backend="llama.cpp", dtype="auto", slots=slots, rows=400, threads=1)
    assert isinstance(engine, LlamaCppEngine)
    return engine


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("gguf"), "F32")


@pytest.fixture(scope="module", params=["a sequence for each leaf", "one for each slot"])
def pair(request: pytest.FixtureRequest, file: Path) -> tuple[Engine, Reference]:
    leaves = llama_cpp.LEAVES
    llama_cpp.LEAVES = leaves if request.param == "a sequence for each leaf" else 1
    engine = load(file)
    llama_cpp.LEAVES = leaves
    return engine, Reference.load(DRAFTER)


@pytest.mark.parametrize("to", ["BF16", "Q8_0", "Q4_K_M"])
def test_quantized_logits_are_near_those_of_our_own_engine(to: str, tmp_path: Path) -> None:
    """Both round inputs to blocks of int8, each in its own way."""
    file = written(tmp_path, to)
    ours = load_engine(file, backend="native", dtype="auto", slots=1, rows=400, threads=1)
    theirs = load(file, slots=1)
    tokens = random_tokens(ours, np.random.default_rng(1), 60)
    expected, found = (engine.forward([prompt(0, tokens)]) for engine in (ours, theirs))
    assert np.abs(found - expected).max() < 0.15 * expected.std()
    assert (found.argmax(-1) == expected.argmax(-1)).mean() > 0.9


def test_a_gpu_is_for_llama_cpp(file: Path) -> None:
    """Where it was built for none, it computes on the processor."""
    engine = load_engine(file, dtype="auto", device="gpu", slots=1, rows=400, threads=1)
    assert isinstance(engine, LlamaCppEngine)
    tokens = random_tokens(engine, np.random.default_rng(5), 20)
    assert np.allclose(engine.forward([prompt(0, tokens)]), load(file, 1).forward([prompt(0, tokens)]), atol=1e-2)


def test_it_says_what_the_file_has(file: Path) -> None:
    ours, theirs = load_engine(file, dtype="auto", slots=SLOTS, rows=400, threads=1), load(file)
    for name in ("vocabulary", "context", "positions", "rows", "slots", "eos_ids", "tokenizer_digest", "parameters"):
        assert getattr(theirs, name) == getattr(ours, name), name
    assert theirs.computed_by == "llama.cpp"


def test_costs_are_measured_behind_a_context(file: Path) -> None:
    engine = load(file, slots=2)
    costs = dict(engine.measure_costs([1, 8], context=64, repeats=2))
    assert 0 < costs[1] < 1
    tokens = random_tokens(engine, np.random.default_rng(2), 20)
    first = engine.forward([prompt(1, tokens)])
    assert np.allclose(first, load(file, slots=1).forward([prompt(0, tokens)]), atol=1e-4)


def test_sessions_share_a_bounded_memory(file: Path) -> None:
    whole = load(file, slots=2)
    bound = whole.kv_bytes * 3 // 4
    engine = load_engine(file, backend="llama.cpp", dtype="auto", slots=2, rows=400, threads=1, kv_memory=bound)
    assert (whole.kv_tokens, whole.memory(0, 0, 10)) == (0, None)
    assert engine.kv_tokens == 600
    assert engine.kv_bytes == bound
    tokens = random_tokens(engine, np.random.default_rng(4), 320)
    engine.forward([prompt(0, tokens, wanted=0)])
    assert engine.memory(0, 320, 330) == (1, 17)
    assert engine.memory(1, 0, 320) == (20, 17)
    engine.release(0, 160)
    assert engine.memory(1, 0, 320) == (20, 27)
    assert np.array_equal(engine.forward([prompt(1, tokens)]), load(file, slots=2).forward([prompt(1, tokens)]))


def test_a_deep_tree_takes_no_more_memory_than_its_slot(file: Path) -> None:
    """A thousand passes, each with a tree in the place of the last one: nothing is left behind."""
    engine = load(file, slots=1)
    random = np.random.default_rng(3)
    text = random_tokens(engine, random, 5)
    engine.forward([prompt(0, text, wanted=0)])
    for _ in range(1000):
        engine.forward([Tree.random(engine, random, 30).segment(0, len(text))])
    last = random_tokens(engine, random, 2)
    found = engine.forward([prompt(0, last, len(text))])
    assert np.allclose(found, Reference.load(DRAFTER).logits([*text, *last])[-2:], atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"dtype": "bfloat16"}, "dtype: llama.cpp computes with the types of the file"),
        ({"numerics": "invariant"}, "numerics: invariant is for the native backend alone"),
        ({"kv_memory": 1 << 16}, "kv_memory: 65536 bytes are too few for one text"),
        ({"slots": 256}, "slots: llama.cpp has sequences for at most 255"),
        ({"layers": 1}, "layers, skip: only the native backend"),
        ({"backend": "native", "device": "gpu"}, "device: gpu is for llama.cpp, and backend is native; use cuda"),
        ({"kv_dtype": "int8"}, "kv_dtype: int8 is served by the compiled engine alone"),
    ],
)
def test_settings_that_it_has_not_are_refused_before_weights_are_read(
    settings: dict[str, object], problem: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(llama_cpp, "LlamaModel")
    given = {"dtype": "auto", "slots": 1, "backend": "llama.cpp"} | settings
    with pytest.raises(ConfigError, match=problem):
        load_engine(file, **given)  # type: ignore[arg-type]


def test_as_many_sessions_as_there_are_sequences_are_served(file: Path) -> None:
    engine = load_engine(file, backend="llama.cpp", dtype="auto", slots=255, rows=16, threads=1)
    tokens = random_tokens(engine, np.random.default_rng(6), 8)
    first, last = (engine.forward([prompt(slot, tokens)]) for slot in (0, 254))
    assert np.allclose(first, last, atol=1e-4)


def test_folders_and_files_that_it_cannot_read_are_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"backend: llama.cpp reads \.gguf files"):
        load_engine(DRAFTER, backend="llama.cpp", dtype="auto", slots=1)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"cut\.gguf"):
        load_engine(cut, backend="llama.cpp", dtype="auto", slots=1)
