"""Models made of some of a checkpoint's layers: early exit and layer skip."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from outrider.engine.checkpoints.checkpoint import read_config
from outrider.engine.checkpoints.padding import pad_checkpoint
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.engine import Engine
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.layer_selection import kept_layers
from outrider.errors import ConfigError
from tests.engine.conftest import EngineClass, OnTorch
from tests.engine.small_checkpoints import MODELS, SHAPES, Reference, assert_same, keep_layers, make_checkpoint, prompt

TOKENS = np.random.default_rng(3).integers(0, 50, 80)


OF_ALL_DTYPES = pytest.mark.parametrize(
    ("engine_class", "dtype"),
    [
        *(pytest.param(CpuEngine, dtype, id=f"compiled-{dtype}") for dtype in ("float32", "bfloat16", "int8", "int4")),
        *(
            pytest.param(OnTorch, dtype, id=f"torch-{dtype}", marks=pytest.mark.extended)
            for dtype in ("float32", "bfloat16", "int4")
        ),
    ],
    indirect=["engine_class"],
)


def load(engine_class: EngineClass, folder: Path, **options: Any) -> Engine:
    return engine_class.load(folder, EngineSettings(**{"dtype": "float32", "slots": 1, "threads": 1, **options}))


def logits(engine: Engine) -> np.ndarray:
    return engine.forward([prompt(0, TOKENS)])


@pytest.mark.parametrize("shape", SHAPES)
def test_an_early_exit_is_the_first_layers_with_the_models_own_norm_and_head(
    engine_class: EngineClass, shape: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "whole", shape)
    pruned = Reference.load(keep_layers(folder, tmp_path / "pruned", (0, 1)))
    engine = load(engine_class, folder, layers=2)
    assert_same(logits(engine), pruned.logits(TOKENS))
    assert engine.parameters == pruned.model.num_parameters()


@pytest.mark.parametrize("skip", [(0,), (1,), (2, 0), (3, 1, 4)])
def test_skipping_layers_equals_a_checkpoint_without_them(
    engine_class: EngineClass, skip: tuple[int, ...], tmp_path: Path
) -> None:
    kept = [index for index in range(6) if index not in skip]
    pruned = load(engine_class, keep_layers(MODELS / "target", tmp_path / "pruned", kept), dtype="bfloat16")
    engine = load(engine_class, MODELS / "target", dtype="bfloat16", skip=skip)
    assert np.array_equal(logits(engine), logits(pruned))
    assert (engine.parameters, engine.weight_bytes) == (pruned.parameters, pruned.weight_bytes)
    assert engine.kv_bytes == pruned.kv_bytes


@OF_ALL_DTYPES
def test_an_exit_behind_the_last_layer_is_the_model_bit_for_bit(engine_class: EngineClass, dtype: str) -> None:
    whole = load(engine_class, MODELS / "drafter", dtype=dtype)
    for same in (
        load(engine_class, MODELS / "drafter", dtype=dtype, layers=2),
        load(engine_class, MODELS / "drafter", dtype=dtype, skip=()),
    ):
        assert np.array_equal(logits(same), logits(whole))
        assert (same.parameters, same.weight_bytes) == (whole.parameters, whole.weight_bytes)


@OF_ALL_DTYPES
def test_a_layer_whose_output_projections_are_zero_may_be_skipped_without_changing_a_bit(
    engine_class: EngineClass, dtype: str, tmp_path: Path
) -> None:
    pad_checkpoint(MODELS / "drafter", tmp_path / "padded", parameters=20_000_000)
    old, new = read_config(MODELS / "drafter").layers, read_config(tmp_path / "padded").layers
    assert new > old
    whole = load(engine_class, tmp_path / "padded", dtype=dtype)
    less = load(engine_class, tmp_path / "padded", dtype=dtype, skip=range(old, new))
    assert np.array_equal(logits(less), logits(whole))
    assert less.weight_bytes < whole.weight_bytes


def test_layers_that_are_left_out_are_not_read(engine_class: EngineClass, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "whole")
    tensors = load_file(folder / "model.safetensors")
    save_file({name: it for name, it in tensors.items() if ".layers.1." not in name}, folder / "model.safetensors")
    assert np.isfinite(logits(load(engine_class, folder, skip=[1]))).all()
    assert np.isfinite(logits(load(engine_class, folder, layers=1))).all()


@pytest.mark.parametrize(
    ("layers", "skip", "named"),
    [
        (0, (), "layers: is 0, must be from 1 to 6"),
        (-1, (), "layers: is -1"),
        (7, (), "layers: is 7, must be from 1 to 6"),
        (None, (6,), "skip: .* no layer 6; its layers are 0 to 5"),
        (None, (2, -1), "skip: .* no layer -1"),
        (None, range(6), "skip: lists all 6 layers"),
        (3, (1,), "skip: cannot be given together with layers"),
    ],
)
def test_a_layer_selection_that_leaves_no_model_is_refused_by_name(
    engine_class: EngineClass, layers: int | None, skip: Collection[int], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        load(engine_class, MODELS / "target", layers=layers, skip=skip)


def test_a_layer_that_is_listed_twice_is_skipped_once() -> None:
    assert kept_layers(4, None, [1, 1]) == (0, 2, 3)
