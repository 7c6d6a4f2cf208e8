"""Low-rank adapters in the compiled engine: the logits of PEFT, and the same bits whatever else a pass holds."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from outrider import _native
from outrider.engine.adapters.low_rank import CONFIG, MOST_RANK, TENSORS, read_adapter
from outrider.engine.checkpoints.checkpoint import read_config
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.features import Features
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.loading import load_engine
from outrider.errors import CheckpointError, ConfigError
from tests.engine.small_adapters import adapted_logits, assert_logits_of_peft, make_adapter, make_adapters
from tests.engine.small_checkpoints import (
    SHAPES,
    Tree,
    adapted,
    assert_same,
    make_checkpoint,
    prompt,
    random_tokens,
)

SOME: tuple[tuple[str, ...], ...] = (
    ("q_proj", "v_proj"),
    ("o_proj",),
    ("up_proj",),
    ("k_proj", "gate_proj", "down_proj"),
)


def load(folder: Path, *, dtype: str = "float32", slots: int = 8, threads: int = 2, **options: Any) -> CpuEngine:
    return CpuEngine.load(folder, EngineSettings(dtype=dtype, slots=slots, threads=threads, **options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), ffn=128)  # int4 allows this width, too


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_adapters(checkpoint, tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_with_an_adapter_equal_those_of_peft(shape: str, tmp_path: Path) -> None:
    assert_logits_of_peft(load, shape, tmp_path)


@pytest.mark.parametrize(
    "terms",
    [{"use_rslora": True}, {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"layers.1.mlp.up_proj": 3, "k_proj": 5}}],
)
@pytest.mark.parametrize("modules", SOME)
def test_scales_and_ranks_of_each_module_are_those_of_peft(
    modules: Sequence[str], terms: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(checkpoint, tmp_path, modules=modules, **terms)
    engine = load(checkpoint)
    text = random_tokens(engine, np.random.default_rng(2), 20)
    changed, _ = engine.load_adapter(adapter)
    assert_same(engine.forward([adapted(prompt(0, text), changed)]), adapted_logits(checkpoint, adapter, text))


@pytest.mark.parametrize("instructions", _native.instruction_sets())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_a_rows_bits_do_not_depend_on_the_adapters_of_other_rows(
    dtype: str, instructions: str, checkpoint: Path, folders: list[Path]
) -> None:
    """Texts with three adapters and without one, alone and in one pass, in chunks, by one thread and by three."""
    alone = load(checkpoint, dtype=dtype, threads=1, instructions=instructions)
    random = np.random.default_rng(3)
    texts = [random_tokens(alone, random, count) for count in (5, 40, 1, 23, 12, 9)]
    order = [0, None, 1, 2, 0, 1]  # adapters of the texts

    def segments(engine: CpuEngine, wanted: int | None) -> list[Segment]:
        adapters = [engine.load_adapter(folder)[0] for folder in folders]
        return [
            adapted(prompt(slot, text, wanted=wanted), None if which is None else adapters[which])
            for slot, (text, which) in enumerate(zip(texts, order, strict=True))
        ]

    expected = [alone.forward([it]) for it in segments(alone, None)]
    differ = [
        not np.array_equal(expected[slot], alone.forward([prompt(slot, text)])) for slot, text in enumerate(texts)
    ]
    assert differ == [which is not None for which in order]
    for threads in (1, 3):
        engine = load(checkpoint, dtype=dtype, threads=threads, instructions=instructions)
        assert np.array_equal(engine.forward(segments(engine, None)), np.concatenate(expected))
        assert np.array_equal(engine.forward(segments(engine, 1)), np.stack([rows[-1] for rows in expected]))
        few = [it for it in segments(engine, None) if len(it.tokens) < 10]  # every thread packs all rows itself
        assert np.array_equal(engine.forward(few), np.concatenate([expected[it.slot] for it in few]))


def test_trees_see_the_adapter_too(checkpoint: Path, folders: list[Path]) -> None:
    engine = load(checkpoint)
    random = np.random.default_rng(4)
    text, tree = random_tokens(engine, random, 30), Tree.random(engine, random, 12)
    changed, _ = engine.load_adapter(folders[0])
    engine.forward([adapted(prompt(0, text), changed)])
    found = engine.forward([adapted(tree.segment(0, len(text)), changed)])
    for node, row in enumerate(found):
        path = np.concatenate([text, tree.tokens[tree.path(node)]])
        assert np.array_equal(row, engine.forward([adapted(prompt(1, path, wanted=1), changed)])[0])


def test_features_of_all_rows_include_the_adapter(checkpoint: Path, folders: list[Path]) -> None:
    engine = load(checkpoint, features=Features((), all_rows=True))
    text = random_tokens(engine, np.random.default_rng(5), 9)
    changed, _ = engine.load_adapter(folders[0])
    logits = engine.forward([adapted(prompt(0, text, wanted=2), changed), prompt(1, text, wanted=1)])
    hidden = engine.hidden().numpy().copy()
    assert np.array_equal(logits[:2], load(checkpoint).forward([adapted(prompt(0, text, wanted=2), changed)]))
    engine.forward([adapted(prompt(0, text), changed)])
    assert np.array_equal(hidden[:9], engine.hidden().numpy())
    assert not np.array_equal(hidden[:9], hidden[9:])


def test_layers_that_are_left_out_take_their_part_of_the_adapter_along(checkpoint: Path, folders: list[Path]) -> None:
    complete, engine = load(checkpoint), load(checkpoint, layers=2)
    text = random_tokens(engine, np.random.default_rng(6), 9)
    changed, _ = engine.load_adapter(folders[0])
    plain = engine.forward([prompt(0, text)])
    assert not np.array_equal(engine.forward([adapted(prompt(0, text), changed)]), plain)
    with pytest.raises(ValueError, match="another model"):
        complete.forward([adapted(prompt(0, text), changed)])


def test_adapters_are_loaded_while_passes_run(checkpoint: Path, folders: list[Path]) -> None:
    engine = load(checkpoint)
    text = random_tokens(engine, np.random.default_rng(7), 60)
    expected = engine.forward([prompt(0, text)])
    stop, wrong = threading.Event(), []

    def run() -> None:
        while not stop.is_set():
            if not np.array_equal(engine.forward([prompt(0, text)]), expected):
                wrong.append("bits")

    passes = threading.Thread(target=run)
    passes.start()
    for _ in range(5):
        for folder in folders:
            engine.load_adapter(folder)
    stop.set()
    passes.join()
    assert not wrong


def test_an_adapter_used_by_a_pass_cannot_be_changed(checkpoint: Path, folders: list[Path]) -> None:
    engine = load(checkpoint)
    changed, _ = engine.load_adapter(folders[0])
    a, b = np.zeros((2, 64), np.float32), np.zeros((64, 2), np.float32)
    changed.set(0, 1, a, b, None, None, None, None)  # type: ignore[attr-defined]
    engine.forward([adapted(prompt(0, np.arange(3)), changed)])
    with pytest.raises(RuntimeError, match="in use"):
        changed.set(0, 1, a, b, None, None, None, None)  # type: ignore[attr-defined]


@pytest.mark.parametrize("given", ["name", 3, object()])
def test_a_foreign_object_is_refused_as_an_adapter(given: object, checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="adapter"):
        load(checkpoint).forward([adapted(prompt(0, np.arange(3)), given)])


@pytest.mark.parametrize(
    ("layer", "part", "shapes", "error"),
    [
        (3, 1, [(2, 64), (64, 2)], "no such linear"),
        (-1, 1, [(2, 64), (64, 2)], "no such linear"),
        (0, 4, [(2, 64), (64, 2)], "no such linear"),
        (0, 1, [(0, 64), (64, 0)], "more ranks"),
        (0, 1, [(513, 64), (64, 513)], "more ranks"),
        (0, 1, [(2, 63), (64, 2)], "shape"),
        (0, 1, [(2, 64), (63, 2)], "shape"),
        (0, 0, [None, None, (2, 64), (64, 2)], "shape"),
        (0, 1, [(2, 64), None], "missing"),
        (0, 1, [(2, 64), (64, 2), (2, 64), (64, 2)], "missing"),
        (0, 2, [None, None, None, None, (2, 64), (99, 2)], "missing"),
    ],
)
def test_the_compiled_adapter_refuses_other_shapes(
    layer: int, part: int, shapes: list[tuple[int, int] | None], error: str
) -> None:
    adapter = _native.Adapter("float32", 64, 64, 32, 99, 3)
    weights = [None if shape is None else np.zeros(shape, np.float32) for shape in shapes]
    with pytest.raises(ValueError, match=error):
        adapter.set(layer, part, *weights, *[None] * (6 - len(weights)))


@pytest.mark.parametrize(
    "sizes", [("int8", 64, 64, 32, 99, 3), ("float32", 0, 64, 32, 99, 3), ("float32", 64, 64, 32, 99, 1 << 30)]
)
def test_the_compiled_adapter_refuses_other_sizes(sizes: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="adapter"):
        _native.Adapter(*sizes)


Change = Callable[[dict[str, Any], dict[str, Any]], object]
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda terms, _: terms.update(peft_type="IA3"), "another kind than LoRA"),
        (lambda terms, _: terms.update(use_dora=True), "DoRA"),
        (lambda terms, _: terms.update(bias="all"), "biases"),
        (lambda terms, _: terms.update(lora_bias=True), "biases"),
        (lambda terms, _: terms.update(fan_in_fan_out=True), "transposed"),
        (lambda terms, _: terms.update(modules_to_save=["lm_head"]), "complete modules"),
        (lambda terms, _: terms.update(init_lora_weights="pissa_niter_4"), "changes the base model"),
        (lambda terms, _: terms.update(lora_alpha="8"), "must be a number"),
        (lambda terms, _: terms.update(lora_alpha=float("nan")), "must be a number"),
        (lambda terms, _: terms.update(lora_alpha=None), "must be a number"),
        (lambda terms, _: terms.update(alpha_pattern={"(a+)+$": 1}), "a module's name"),
        (lambda _, tensors: tensors.pop(f"{LAYER}.lora_B.weight"), "no lora_B"),
        (
            lambda _, tensors: tensors.update({"base_model.model.lm_head.lora_A.weight": np.zeros((2, 2))}),
            "lm_head.lora_A",
        ),
        (
            lambda _, tensors: tensors.update({LAYER.replace("0", "3") + ".lora_A.weight": np.zeros((2, 2))}),
            "layers 0 to 2",
        ),
        (
            lambda _, tensors: tensors.update({LAYER.replace("self_attn", "mlp") + ".lora_A.weight": np.zeros(2)}),
            "q_proj",
        ),
        (lambda _, tensors: tensors.update({f"{LAYER}.lora_A.weight": np.zeros((4, 65), np.float32)}), r"\[4, 65\]"),
        (lambda _, tensors: tensors.update({f"{LAYER}.lora_B.weight": np.zeros((64, 5), np.float32)}), r"\[64, 5\]"),
        (lambda _, tensors: tensors.update({f"{LAYER}.lora_A.weight": np.zeros((65, 64), np.float32)}), "rank 65"),
        (lambda _, tensors: tensors.update({f"{LAYER}.lora_A.weight": np.zeros(64, np.float32)}), "rank 0"),
        (lambda _, tensors: tensors.update({f"{LAYER}.lora_A.weight": np.full((4, 64), np.inf, np.float32)}), "finite"),
        (lambda _, tensors: tensors.update({f"{LAYER}.lora_A.weight": np.zeros((4, 64), np.int32)}), "int32"),
        (lambda _, tensors: tensors.clear(), "no adapter"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused_by_name(
    change: Change, error: str, checkpoint: Path, tmp_path: Path
) -> None:
    folder = make_adapter(checkpoint, tmp_path)
    terms, tensors = json.loads((folder / CONFIG).read_text(encoding="utf-8")), load_file(folder / TENSORS)
    change(terms, tensors)
    (folder / CONFIG).write_text(json.dumps(terms), encoding="utf-8")
    save_file(tensors, folder / TENSORS)
    with pytest.raises(CheckpointError, match=error) as refused:
        read_adapter(folder, read_config(checkpoint))
    assert str(tmp_path) in str(refused.value)


@pytest.mark.parametrize("missing", [CONFIG, TENSORS, ""])
def test_files_that_are_missing_or_cut_off_are_named(missing: str, checkpoint: Path, tmp_path: Path) -> None:
    folder = make_adapter(checkpoint, tmp_path / "adapter")
    if missing:
        (folder / missing).unlink()
    with pytest.raises(CheckpointError, match=missing or "no such folder"):
        read_adapter(folder if missing else tmp_path / "other", read_config(checkpoint))
    if missing == TENSORS:
        (folder / TENSORS).write_bytes(b"\x10\0\0\0\0\0\0\0{")
        with pytest.raises(CheckpointError, match="truncated"):
            read_adapter(folder, read_config(checkpoint))


def test_a_rank_is_bounded(checkpoint: Path, tmp_path: Path) -> None:
    folder = make_adapter(checkpoint, tmp_path, modules=["q_proj"])
    config = replace(read_config(checkpoint), width=4096)
    tensors = load_file(folder / TENSORS)
    tensors[f"{LAYER}.lora_A.weight"] = np.zeros((MOST_RANK + 1, 4096), np.float32)
    save_file(tensors, folder / TENSORS)
    with pytest.raises(CheckpointError, match=f"1 to {MOST_RANK}"):
        read_adapter(folder, config)


def test_the_device_engine_gives_equal_logits_with_adapters(checkpoint: Path, folders: list[Path]) -> None:
    from outrider.engine.gpu import DeviceEngine

    engine = load(checkpoint)
    device = DeviceEngine.load(checkpoint, EngineSettings(device="cpu", dtype="float32", slots=8, rows=100, adapters=3))
    random = np.random.default_rng(9)
    segments = [prompt(slot, random_tokens(engine, random, count)) for slot, count in enumerate((7, 30, 1, 12))]
    ours, expected = (
        it.forward([*map(adapted, segments, [None, *(it.load_adapter(folder)[0] for folder in folders)])])
        for it in (device, engine)
    )
    assert np.abs(ours - expected).max() <= 2e-5 * max(1.0, float(expected.std()))


def test_models_that_transformers_computes_have_no_adapters(checkpoint: Path, folders: list[Path]) -> None:
    engine = load_engine(checkpoint, backend="transformers", dtype="float32", slots=1, rows=64, threads=1)
    with pytest.raises(ConfigError, match=r"adapters: .* has none; use the native backend"):
        engine.load_adapter(folders[0])
