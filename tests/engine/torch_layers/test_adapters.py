"""Low-rank adapters in the engine on torch: the logits of PEFT, of the compiled engine and of merged weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Dtype, Engine
from outrider.engine.interface.features import Features
from outrider.engine.torch_layers.engine import NativeEngine
from outrider.errors import CheckpointError
from tests.engine.small_adapters import (
    assert_logits_of_peft,
    load_peft,
    make_adapter,
    make_adapters,
    quiet,
)
from tests.engine.small_checkpoints import (
    SHAPES,
    Reference,
    Tree,
    adapted,
    assert_same,
    make_checkpoint,
    prompt,
    random_tokens,
)

ORDER = [0, None, 1, 2, 0, 1]  # adapters of the segments of a mixed pass
LENGTHS = (5, 40, 1, 23, 12, 9)


def load(folder: Path, dtype: Dtype = "float32", **options: Any) -> NativeEngine:
    return NativeEngine.load(folder, dtype=dtype, slots=8, threads=1, **options)


def mixed(engine: Engine, folders: Sequence[Path], wanted: int | None = None) -> list[Segment]:
    """Texts with three adapters and without one."""
    random = np.random.default_rng(3)
    adapters = [engine.load_adapter(folder)[0] for folder in folders]
    return [
        adapted(
            prompt(slot, random_tokens(engine, random, length), wanted=wanted),
            None if which is None else adapters[which],
        )
        for slot, (length, which) in enumerate(zip(LENGTHS, ORDER, strict=True))
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), ffn=128)  # int4 allows this width, too


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_adapters(checkpoint, tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_peft(shape: str, tmp_path: Path) -> None:
    assert_logits_of_peft(load, shape, tmp_path)


def test_logits_are_those_of_merged_weights(checkpoint: Path, folders: list[Path], tmp_path: Path) -> None:
    with quiet(), torch.no_grad():
        load_peft(checkpoint, folders[0]).merge_and_unload().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    engine = load(checkpoint)
    text = random_tokens(engine, np.random.default_rng(2), 50)
    changed, _ = engine.load_adapter(folders[0])
    expected = Reference.load(tmp_path, torch.float64).logits(text)
    assert_same(engine.forward([adapted(prompt(0, text), changed)]), expected)
    assert_same(load(tmp_path).forward([prompt(0, text)]), expected)


@pytest.mark.parametrize("wanted", [None, 1])
def test_a_mixed_pass_gives_the_logits_of_the_compiled_engine(
    wanted: int | None, checkpoint: Path, folders: list[Path]
) -> None:
    engine = load(checkpoint)
    compiled = CpuEngine.load(checkpoint, dtype="float32", slots=8, threads=1)
    ours = engine.forward(mixed(engine, folders, wanted))
    assert_same(ours, compiled.forward(mixed(compiled, folders, wanted)))
    plain = engine.forward([adapted(it, None) for it in mixed(engine, folders, wanted)])
    rows = np.repeat([which is not None for which in ORDER], LENGTHS if wanted is None else 1)
    assert [bool(it) for it in (np.abs(ours - plain).max(1) > 1e-3)] == rows.tolist()


def test_trees_see_the_adapter_too(checkpoint: Path, folders: list[Path]) -> None:
    engine, compiled = load(checkpoint), CpuEngine.load(checkpoint, dtype="float32", slots=2, threads=1)
    random = np.random.default_rng(4)
    text, tree = random_tokens(engine, random, 30), Tree.random(engine, random, 12)

    def of_tree(it: Engine) -> NDArray[np.float32]:
        changed, _ = it.load_adapter(folders[0])
        it.forward([adapted(prompt(0, text), changed)])
        return it.forward([adapted(tree.segment(0, len(text)), changed)])

    assert_same(of_tree(engine), of_tree(compiled))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_a_row_s_bits_do_not_depend_on_the_adapters_of_others(
    dtype: Dtype, checkpoint: Path, folders: list[Path]
) -> None:
    """In passes of one shape, whose attention is the same: each text keeps its adapter, and the others lose theirs."""
    engine = load(checkpoint, dtype)
    segments = mixed(engine, folders)
    expected = np.split(engine.forward(segments), np.cumsum(LENGTHS)[:-1])
    for slot, rows in enumerate(expected):
        others = [it if it.slot == slot else adapted(it, None) for it in segments]
        assert np.array_equal(np.split(engine.forward(others), np.cumsum(LENGTHS)[:-1])[slot], rows)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_rounded_weights_are_as_near_to_exact_ones_with_an_adapter_as_without(
    dtype: Dtype, checkpoint: Path, folders: list[Path]
) -> None:
    engine, exact = load(checkpoint, dtype), load(checkpoint)
    text = random_tokens(exact, np.random.default_rng(8), 60)

    def error(folder: Path | None) -> float:
        found, expected = (
            it.forward([adapted(prompt(0, text), None if folder is None else it.load_adapter(folder)[0])])
            for it in (engine, exact)
        )
        return float(np.sqrt(np.mean((found - expected) ** 2) / np.var(expected)))

    assert 0 < error(folders[0]) < 1.5 * error(None) + 0.01


def test_features_of_all_rows_are_those_with_the_adapter(checkpoint: Path, folders: list[Path]) -> None:
    engine = load(checkpoint, features=Features((), all_rows=True))
    compiled = CpuEngine.load(checkpoint, dtype="float32", slots=8, threads=1, features=Features((), all_rows=True))
    logits = [it.forward(mixed(it, folders, 1)) for it in (engine, compiled)]
    assert_same(*logits)
    assert_same(engine.hidden().numpy(), compiled.hidden().numpy())


def test_layers_that_are_left_out_take_their_part_of_the_adapter_along(checkpoint: Path, folders: list[Path]) -> None:
    engine = load(checkpoint, skip=(1,))
    compiled = CpuEngine.load(checkpoint, dtype="float32", slots=8, threads=1, skip=(1,))
    assert_same(engine.forward(mixed(engine, folders)), compiled.forward(mixed(compiled, folders)))


def test_what_is_no_adapter_of_the_engine_is_refused(checkpoint: Path, folders: list[Path]) -> None:
    engine = load(checkpoint)
    compiled = CpuEngine.load(checkpoint, dtype="float32", slots=1)
    others = [load(checkpoint, layers=2), load(checkpoint, "bfloat16"), compiled]
    for given in ("name", *(it.load_adapter(folders[0])[0] for it in others)):
        with pytest.raises(ValueError, match="an adapter of another model or engine"):
            engine.forward([adapted(prompt(0, np.arange(3)), given)])


def test_an_adapter_of_another_model_is_not_loaded(checkpoint: Path, tmp_path: Path) -> None:
    wide = make_adapter(make_checkpoint(tmp_path / "wide", "untied-wide-heads", 128), tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="has shape"):
        load(checkpoint).load_adapter(wide)
