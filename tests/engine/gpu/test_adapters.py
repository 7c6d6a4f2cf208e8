"""Adapters on the device's engine: logits are those of merged weights, whatever else a pass holds and whenever one
comes or goes."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.low_rank_files import make_adapter, merge_adapter
from outrider.core.sampling.noise import Draw
from outrider.engine.adapters.low_rank import DOWN, GATE_UP, MODULES, OUTPUT, QKV, LowRankAdapter, LowRankUpdate
from outrider.engine.checkpoints.checkpoint import read_config
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.gpu import DeviceEngine
from outrider.engine.gpu.adapters import adapter_table
from outrider.engine.gpu.adapters.adapter_memory import AdapterForm, DeviceAdapter
from outrider.engine.gpu.adapters.adapter_table import RESERVED_RANK, NoAdapterTable
from outrider.engine.gpu.attention import kv_memory
from outrider.engine.gpu.linears.float8 import Float8Weight
from outrider.engine.gpu.linears.int4 import GroupedInt4Weight
from outrider.engine.gpu.passes.packing import MOST_ROWS, packed
from outrider.engine.gpu.weights import Weight
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Engine
from outrider.engine.interface.masks import tree_mask
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.loading import load_engine
from outrider.engine.tensor_parallel.group import ALONE
from outrider.engine.torch_layers.linear import Linear
from outrider.errors import CheckpointError, ConfigError
from tests.engine.gpu.taped import DEVICE, taped
from tests.engine.small_checkpoints import SHAPES, Tree, adapted, make_checkpoint, prompt, random_tokens

SLOTS, ROWS_HELD = 8, 200
OPERATION = "add_low_rank"


def on_device(folder: Path, **changes: Any) -> DeviceEngine:
    terms = {"device": DEVICE, "dtype": "float32", "slots": SLOTS, "rows": ROWS_HELD, "adapters": 4, **changes}
    return DeviceEngine.load(folder, EngineSettings(**terms))


def eager(folder: Path) -> CpuEngine:
    return CpuEngine.load(folder, EngineSettings(dtype="float32", slots=SLOTS, threads=1, rows=ROWS_HELD))


def handle(engine: Engine, folder: Path) -> DeviceAdapter:
    return cast(DeviceAdapter, engine.load_adapter(folder)[0])


def assert_near(ours: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """Merged weights are rounded to float32 themselves."""
    assert ours.shape == expected.shape
    assert ours.size
    assert np.abs(ours - expected).max() <= 5e-5 * max(1.0, float(expected.std()))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), ffn=128)  # int4 allows this width, too


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """An adapter of all linears, and those of some with other ranks."""
    folder = tmp_path_factory.mktemp("adapters")
    config = read_config(checkpoint)
    return [
        make_adapter(folder / str(seed), config, rank, seed, modules=modules, deviation=0.2)
        for seed, (modules, rank) in enumerate(
            [([*MODULES], 4), (["q_proj", "v_proj"], 20), (["k_proj", "gate_proj", "down_proj"], 33)]
        )
    ]


@pytest.fixture(scope="module")
def references(checkpoint: Path, folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[CpuEngine]:
    """The engines of the merged weights, and the one without adapters behind them."""
    folder = tmp_path_factory.mktemp("merged")
    merged = [merge_adapter(checkpoint, it, folder / it.name) for it in folders]
    return [eager(it) for it in (*merged, checkpoint)]


def expected_of(
    references: Sequence[CpuEngine], segments: Sequence[Segment], which: Sequence[int | None]
) -> NDArray[np.float32]:
    found = [
        references[-1 if one is None else one].forward([replace(segment, adapter=None)])
        for segment, one in zip(segments, which, strict=True)
    ]
    return np.concatenate(found)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_merged_weights_for_every_shape(shape: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", shape)
    files = make_adapter(tmp_path / "adapter", read_config(folder), 5, 1, deviation=0.2)
    engine, reference = on_device(folder), eager(merge_adapter(folder, files, tmp_path / "merged"))
    tapes = taped(engine)
    random = np.random.default_rng(1)
    text, tree = random_tokens(engine, random, 60), Tree.random(engine, random, 10)
    changed, read = engine.load_adapter(files)
    assert read.rank == 5
    plain = engine.forward([prompt(1, text)])
    for start, end in ((0, 40), (40, 41), (41, 60)):
        part = prompt(0, text[start:end], start)
        ours = engine.forward([adapted(part, changed)])
        assert_near(ours, reference.forward([part]))
        assert np.abs(ours - plain[start:end]).max() > 0.5  # the adapter has an effect
    assert_near(engine.forward([adapted(tree.segment(0, 60), changed)]), reference.forward([tree.segment(0, 60)]))
    tapes.check_that_the_host_reads_nothing()


@pytest.mark.parametrize("seed", range(3))
def test_texts_of_several_adapters_and_without_share_passes(
    checkpoint: Path, folders: list[Path], references: list[CpuEngine], seed: int
) -> None:
    engine = on_device(checkpoint)
    random = np.random.default_rng(seed)
    handles = [handle(engine, it) for it in folders]
    which = [None if at == 3 else at for at in random.integers(0, 4, SLOTS).tolist()]
    lengths = random.integers(1, 60, SLOTS).tolist()
    prompts = [prompt(slot, random_tokens(engine, random, count)) for slot, count in enumerate(lengths)]
    for _ in range(3):
        changed = [
            segment if one is None else adapted(segment, handles[one])
            for segment, one in zip(prompts, which, strict=True)
        ]
        assert_near(engine.forward(changed), expected_of(references, prompts, which))
        trees = [Tree.random(engine, random, int(count)) for count in random.integers(1, 9, SLOTS)]
        prompts = [tree.segment(slot, lengths[slot]) for slot, tree in enumerate(trees)]


def test_adapters_are_loaded_and_dropped_while_recordings_stay(
    checkpoint: Path, folders: list[Path], references: list[CpuEngine]
) -> None:
    """What an adapter that was dropped left behind is overwritten, so that a pass that read it would show."""
    engine = on_device(checkpoint)
    tapes = taped(engine)
    random = np.random.default_rng(4)
    text = [random_tokens(engine, random, 12) for _ in range(3)]
    segments = [prompt(slot, tokens) for slot, tokens in enumerate(text)]
    assert_near(engine.forward(segments), expected_of(references, segments, [None] * 3))
    assert not any(OPERATION in name for name in tapes.operations)
    first = handle(engine, folders[0])
    engine.forward([adapted(it, first) for it in segments])
    recorded = len(tapes.tapes)
    used = sum(OPERATION in name for name in tapes.operations)
    assert DEVICE != "cpu" or used == 4 * 3  # a linear, a layer
    first.memory.fill_(255)
    del first
    gc.collect()
    for which in ([1, 0, None], [2, 2, 1], [None, None, 0], [None] * 3, [0, 1, 2]):
        handles = [None if one is None else handle(engine, folders[one]) for one in which]
        ours = engine.forward([adapted(it, one) for it, one in zip(segments, handles, strict=True)])
        assert_near(ours, expected_of(references, segments, which))
        for one in handles:
            if one is not None:
                one.memory.fill_(255)
    assert len(tapes.tapes) == recorded


def test_all_passes_are_recorded_before_an_adapter_is_loaded(
    checkpoint: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.engine.gpu.engine.ROWS", (1, 8))
    monkeypatch.setattr("outrider.engine.gpu.engine.OUTPUTS", (1, 8))
    monkeypatch.setattr("outrider.engine.gpu.engine.LEVELS", (8,))
    monkeypatch.setattr("outrider.engine.gpu.sampling.token_choice.OUTPUTS", (1, 8))
    made = {}
    for adapters in (0, 4):
        engine = on_device(checkpoint, adapters=adapters)
        tapes = taped(engine)
        engine.record()
        made[adapters] = len(tapes.tapes)
        changed = [None] if not adapters else [None, *(handle(engine, folder) for folder in folders)]
        for one in changed:
            engine.sample([adapted(prompt(0, np.arange(7)), one)], [Draw(3, 1.0)])
            engine.sample([adapted(prompt(0, np.arange(1), 7), one)], [Draw(3, 1.0)])
        assert len(tapes.tapes) == made[adapters]
    assert made[4] == made[0] + 2


def test_an_adapter_is_dropped_with_the_last_reference_to_it(checkpoint: Path, folders: list[Path]) -> None:
    engine = on_device(checkpoint)
    changed = handle(engine, folders[0])
    memory = weakref.ref(changed.memory)
    logits = engine.sample([adapted(prompt(0, np.arange(5)), changed)], [Draw(1, 1.0)])
    row = logits.row(4).copy()
    assert memory() is not None
    del changed
    gc.collect()
    assert memory() is None
    assert np.array_equal(logits.row(4), row)


def test_adapters_are_loaded_while_passes_run(checkpoint: Path, folders: list[Path]) -> None:
    engine = on_device(checkpoint)
    text = random_tokens(engine, np.random.default_rng(7), 30)
    changed = handle(engine, folders[0])
    segments = [adapted(prompt(0, text), changed), prompt(1, text)]
    expected = engine.forward(segments)
    stop, same = threading.Event(), []

    def run() -> None:
        while not same or not stop.is_set():
            same.append(np.array_equal(engine.forward(segments), expected))

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(5):
        for folder in folders:
            engine.load_adapter(folder)
    stop.set()
    thread.join()
    assert same
    assert all(same)


def merge_into(engine: DeviceEngine, adapter: LowRankAdapter) -> None:
    """Have an engine compute with its own weights, whatever their type, plus those of an adapter, in bfloat16."""

    def merged(weight: Weight, updates: Mapping[str, LowRankUpdate], names: Sequence[str]) -> Tensor:
        added = np.concatenate([updates[name].b @ updates[name].a for name in names])
        if isinstance(weight, Float8Weight):
            exact = weight.values.float() * weight.scales[:, None]
        elif isinstance(weight, Linear):  # packed for a CPU
            exact = weight(torch.eye(added.shape[1])).float().T
        else:
            exact = weight.exact().float() if isinstance(weight, GroupedInt4Weight) else weight.float()
        return (exact + torch.from_numpy(added).to(exact.device)).bfloat16()

    model = engine.passes.model
    layers = tuple(
        layer._replace(
            qkv=merged(layer.qkv, adapter.layers[index], QKV),
            output=merged(layer.output, adapter.layers[index], OUTPUT),
            gate_up=merged(layer.gate_up, adapter.layers[index], GATE_UP),
            down=merged(layer.down, adapter.layers[index], DOWN),
        )
        for index, layer in enumerate(model.weights.layers)
    )
    model.weights = model.weights._replace(layers=layers)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8", "int4"])
def test_weights_of_fewer_bits_have_adapters_in_bfloat16(dtype: str, checkpoint: Path, folders: list[Path]) -> None:
    engine, merged = (on_device(checkpoint, dtype=dtype) for _ in range(2))
    text = random_tokens(engine, np.random.default_rng(8), 40)
    changed, read = engine.load_adapter(folders[0])
    assert cast(DeviceAdapter, changed).form.dtype == torch.bfloat16
    merge_into(merged, read)
    ours, plain = engine.forward([adapted(prompt(0, text), changed), prompt(1, text)]).reshape(2, 40, -1)
    expected = merged.forward([prompt(0, text)])
    left, effect = (float(np.sqrt(np.square(it - expected).mean())) for it in (ours, plain))
    assert left < 0.03 * effect


def test_layers_that_are_left_out_take_their_part_of_the_adapter_along(
    checkpoint: Path, folders: list[Path], tmp_path: Path
) -> None:
    engine = on_device(checkpoint, skip=[1])
    merged = on_device(merge_adapter(checkpoint, folders[0], tmp_path / "merged"), skip=[1])
    text = random_tokens(engine, np.random.default_rng(6), 9)
    changed = handle(engine, folders[0])
    assert_near(engine.forward([adapted(prompt(0, text), changed)]), merged.forward([prompt(0, text)]))
    with pytest.raises(ValueError, match="slot 3: its adapter is one of another model"):
        on_device(checkpoint).forward([prompt(0, text), adapted(prompt(3, text), changed)])


@pytest.mark.parametrize("given", ["name", 3, object()])
@pytest.mark.parametrize("adapters", [0, 4])
def test_a_foreign_object_is_refused_as_an_adapter(given: object, adapters: int, checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="adapter"):
        on_device(checkpoint, adapters=adapters).forward([adapted(prompt(0, np.arange(3)), given)])


def test_an_engine_without_adapters_has_no_buffers_for_them_and_refuses_to_load_one(
    checkpoint: Path, folders: list[Path]
) -> None:
    engine = on_device(checkpoint, adapters=0)
    with pytest.raises(ConfigError, match="--adapters"):
        engine.load_adapter(folders[0])
    changed = handle(on_device(checkpoint), folders[0])
    with pytest.raises(ValueError, match="adapter"):
        engine.forward([adapted(prompt(0, np.arange(3)), changed)])
    assert isinstance(engine.adapters, NoAdapterTable)


def test_an_adapter_of_another_model_is_named(checkpoint: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "narrow-heads")
    files = make_adapter(tmp_path / "adapter", read_config(other), 4, 1)
    with pytest.raises(CheckpointError, match="shape"):
        on_device(checkpoint).load_adapter(files)


def test_an_adapter_for_which_memory_does_not_suffice_is_refused(
    checkpoint: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    engine = on_device(checkpoint)
    monkeypatch.setattr(adapter_table, "place_adapter", full)
    with pytest.raises(ConfigError, match=r"too little memory for .*, of rank 4, .* max_adapters, 4, of rank 16: set"):
        engine.load_adapter(folders[0])
    monkeypatch.undo()
    text = prompt(0, np.arange(9))
    assert not np.array_equal(
        engine.forward([text]), engine.forward([adapted(text, handle(engine, folders[0]))])
    )  # the engine goes on


def test_kv_leaves_memory_to_adapters(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(checkpoint)
    form = AdapterForm.of(config, torch.bfloat16, torch.device("cuda"))
    weights = 64 * (64 + 64 + 32 + 32) + 64 * 64 + 3 * 64 * 128  # of a layer
    sides = 4 * 64 + 2 * (64 + 32) + 3 * (64 + 128)
    assert weights > sides
    assert form.bytes_of(RESERVED_RANK) == 2 * 3 * RESERVED_RANK * sides
    page = kv_memory.page_bytes(config, torch.bfloat16)
    assert page == 2 * config.layers * config.kv_heads * 64 * config.head_dim * 2
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (kv_memory.WORKSPACE_BYTES + 101 * page, 2**40))

    def pages(reserved: int) -> int:
        return kv_memory.pages_for(form.device, page, 90, 200, None, ALONE, reserved)

    assert (pages(0), pages(20 * page)) == (100, 80)
    with pytest.raises(ConfigError, match="free for it; lower max_adapters or slots"):
        pages(99 * page)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (kv_memory.WORKSPACE_BYTES, 2**40))
    with pytest.raises(ConfigError, match="free for it; lower the context"):
        pages(0)


def test_the_number_of_adapters_reaches_the_device_s_engine(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def load(path: Path, settings: EngineSettings) -> Any:
        found.append(settings.adapters)
        raise ConfigError("enough")

    monkeypatch.setattr(DeviceEngine, "load", load)
    for adapters in (0, 7):
        with pytest.raises(ConfigError, match="enough"):
            load_engine(checkpoint, dtype="float32", device="cuda", slots=1, adapters=adapters)
    assert found == [0, 7]


def test_all_parts_of_a_divided_segment_keep_its_adapter() -> None:
    mark = object()
    chain = adapted(prompt(0, np.zeros(2 * MOST_ROWS + 5, np.int64)), mark)
    rows = 600
    mask = tree_mask(rows, [rows - 1, rows - 1])
    tree = Segment(1, 0, np.zeros(rows + 2, np.int64), np.arange(rows + 2), mask, None, mark)
    parts = [part.segment for parts in packed([chain, tree]) for part in parts]
    assert len(parts) >= 5
    assert all(part.adapter is mark for part in parts)
    assert sum(len(part.tokens) for part in parts) == 2 * MOST_ROWS + 5 + rows + 2
