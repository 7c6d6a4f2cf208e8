"""Weights of GGUF files in the compiled engine: every type, mixed ones, and what cannot be packed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider import _native
from outrider.engine.checkpoints.block_types import QUANTIZED, TYPES
from outrider.engine.checkpoints.stored_tensors import FileRows, StoredTensors
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.engine import Dtype
from outrider.engine.interface.features import Features
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.loading import load_engine
from outrider.errors import CheckpointError
from tests.engine.cpu.native_parts import llama_parts
from tests.engine.gguf.block_files import VOCABULARY, WIDTH, model_file
from tests.engine.ranked import leading, meet, meeting_point
from tests.engine.small_checkpoints import assert_invariant, prompt

# As converters choose types for Q4_K_M: some weights of a linear are of another type than the rest.
MIXED = {"attn_v": "q6_k", "ffn_down": "q6_k", "ffn_up": "q5_0", "token_embd": "q8_0", "output": "q6_k"}


def load(file: Path, dtype: Dtype = "stored", **changes: object) -> CpuEngine:
    settings: dict[str, object] = {"slots": 2, "rows": 200, "threads": 2} | changes
    return CpuEngine.load(file, EngineSettings(dtype=dtype, **settings))  # type: ignore[arg-type]


def mixed(name: str) -> str:
    return MIXED.get(name.rpartition(".")[2], "q4_k")


def check_close(file: Path, tokens: Sequence[int]) -> None:
    """Inputs are rounded to 8 bits in blocks of 32: a few thousandths in each of some fifteen linears."""
    exact = load(file, "float32").forward([prompt(0, np.array(tokens))])
    found = load(file).forward([prompt(0, np.array(tokens))])
    assert 0 < np.sqrt(((found - exact) ** 2).mean()) / exact.std() < 0.03


@pytest.mark.parametrize("kind", [*QUANTIZED, "f32", "f16", "bf16"])
def test_every_type_gives_the_dequantized_models_logits(kind: str, tmp_path: Path) -> None:
    file = model_file(tmp_path / "model.gguf", lambda _: kind)
    check_close(file, range(60))
    engine = load_engine(file, dtype="auto", slots=1, rows=100)
    assert engine.dtype == kind
    values = sum(rows * columns for rows, columns in matrices_of(file).values())
    padding = 29 * WIDTH  # the head's panels are of 16 outputs, and even in number
    assert VOCABULARY + 29 == 160
    read = engine.weight_bytes * TYPES[kind].values / TYPES[kind].bytes
    assert values <= read <= values + padding


def matrices_of(file: Path) -> dict[str, tuple[int, int]]:
    from outrider.engine.checkpoints.checkpoint import Weights

    source = Weights(file)
    shapes = {name: source.shape(name) for name in source.files}
    return {name: (it[0], it[1]) for name, it in shapes.items() if len(it) == 2}


@pytest.mark.parametrize("tied", [True, False])
def test_weights_of_a_linear_may_differ_in_type(tied: bool, tmp_path: Path) -> None:
    check_close(model_file(tmp_path / "model.gguf", mixed, tied=tied), range(60))


@pytest.mark.parametrize("plain", ["f32", "f16", "bf16"])
def test_a_linear_with_a_weight_that_is_not_quantized_is_computed_in_floats(plain: str, tmp_path: Path) -> None:
    file = model_file(tmp_path / "model.gguf", lambda name: plain if name.endswith(("attn_k", "ffn_gate")) else "q4_0")
    check_close(file, range(60))
    file = model_file(tmp_path / "plain.gguf", lambda name: "q4_0" if name.endswith("ffn_down") else plain)
    check_close(file, range(60))


@pytest.mark.parametrize("instructions", _native.instruction_sets())
@pytest.mark.parametrize("kind_of", [lambda _: "q4_0", mixed], ids=["q4_0", "mixed"])
def test_a_tokens_bits_are_the_same_in_every_batch(
    kind_of: Callable[[str], str], instructions: str, tmp_path: Path
) -> None:
    engine = load(model_file(tmp_path / "model.gguf", kind_of), instructions=instructions)
    assert_invariant(engine, nodes=37)


@pytest.mark.parametrize("kind_of", [lambda _: "q4_0", lambda name: "q8_0" if "output" in name else "q4_k"])
def test_ranks_share_a_model_in_blocks(kind_of: Callable[[str], str], tmp_path: Path) -> None:
    file, tokens = model_file(tmp_path / "model.gguf", kind_of), np.arange(60)
    alone = load(file).forward([prompt(0, tokens)])
    with leading(file, 2, dtype="stored") as engine:
        found = engine.forward([prompt(0, tokens)])
        assert engine.weight_bytes < 0.6 * load(file).weight_bytes
    assert np.abs(found - alone).max() < 0.05 * alone.std()
    assert (found.argmax(1) == alone.argmax(1)).mean() > 0.9


def test_ranks_that_would_cut_blocks_are_refused(tmp_path: Path) -> None:
    file = model_file(tmp_path / "model.gguf", lambda name: "q6_k" if name.endswith("attn_output") else "q4_0")
    groups = [it.result() for it in meet(2, meeting_point())]
    for group in groups:
        with pytest.raises(
            CheckpointError, match=r"o_proj.* cannot be divided at .* q6_k, in blocks of 256; let fewer"
        ):
            load(file, group=group)
        group.close()


def test_layers_may_be_left_out_and_features_taken(tmp_path: Path) -> None:
    file, tokens = model_file(tmp_path / "model.gguf", mixed), np.arange(60)
    found = {}
    kinds: tuple[Dtype, Dtype] = ("float32", "stored")
    for dtype in kinds:
        one, both = load(file, dtype, layers=1), load(file, dtype, features=Features((1,), all_rows=True))
        logits = one.forward([prompt(0, tokens)])
        both.forward([prompt(0, tokens)])
        found[dtype] = logits, both.hidden().numpy()
        assert one.weight_bytes < both.weight_bytes
    for exact, near in zip(*found.values(), strict=True):
        assert 0 < np.sqrt(((near - exact) ** 2).mean()) / exact.std() < 0.03


def spoiled(file: Path, name: str, value: float) -> Path:
    """The file with that scale in the first block of a tensor of q4_0."""
    from outrider.engine.checkpoints.gguf.header import GgufFile

    start = GgufFile(file).tensors[name].start
    content = bytearray(file.read_bytes())
    content[start : start + 2] = np.array([value], np.float16).tobytes()
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_scale_that_is_no_number_makes_logits_that_are_none(value: float, tmp_path: Path) -> None:
    file = spoiled(model_file(tmp_path / "model.gguf", lambda _: "q4_0"), "blk.0.ffn_up.weight", value)
    assert not np.isfinite(load(file).forward([prompt(0, np.arange(20))])[-1]).any()


def test_a_scale_of_zero_is_a_block_of_zeros(tmp_path: Path) -> None:
    file = spoiled(model_file(tmp_path / "model.gguf", lambda _: "q4_0"), "blk.0.ffn_up.weight", 0.0)
    check_close(file, range(60))


def bad(blocks: NDArray[np.uint8], kind: str = "q4_k") -> tuple[str, NDArray[np.uint8]]:
    return kind, blocks


def test_blocks_that_are_none_are_refused() -> None:
    angles = np.zeros((8, 8), np.float32)
    shape = (32, 32, 256, 1, 1, 1, 16, 32, 8, 1, 8, 1e-5, 0)
    model = _native.Model(
        "stored", "stored", "bfloat16", shape, *llama_parts(1, 16), angles, angles, 1, "", (), False, (0, 0.0, ())
    )
    norm = np.ones(256, np.float32)
    for head, problem in (
        (bad(np.zeros((32, 143), np.uint8)), "another shape"),
        (bad(np.zeros((32, 144), np.uint8), "q4_m"), "no format of blocks is named q4_m"),
        (bad(np.zeros((31, 144), np.uint8)), "another shape"),
        (bad(np.zeros((32, 288), np.uint8)), "another shape"),
        (bad(np.zeros((32, 18), np.uint8), "q4_0"), "another shape"),
        (bad(np.zeros(144, np.uint8)), "blocks are rows of bytes"),
        (("q4_k", FileRows(0, 0, 31, 144, 0)), "another shape"),
        (("q4_k", FileRows(0, 0, 32, 143, 0)), "another shape"),
        (("bf16", FileRows(0, 0, 32, 511, 0)), "another shape"),
        (("q4_k", FileRows(-1, 0, 32, 144, 0)), "no rows of a file"),
        (("q4_k", FileRows(0, -1, 32, 144, 0)), "no rows of a file"),
        (("q4_k", FileRows(0, 0, 32, 144, 5)), "no rows of a file"),
    ):
        with pytest.raises(ValueError, match=problem):
            model.set_ends(None, norm, head)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    angles, norm = np.zeros((8, 8), np.float32), np.ones(256, np.float32)
    shape = (512, 512, 256, 1, 1, 1, 16, 32, 8, 1, 8, 1e-5, 0)
    (tmp_path / "weights").write_bytes(bytes(511 * 144))
    kinds = ("stored", "stored", "bfloat16")
    for threads in (1, 2):
        model = _native.Model(*kinds, shape, *llama_parts(1, 16), angles, angles, threads, "", (), False, (0, 0.0, ()))
        with (tmp_path / "weights").open("rb") as file:
            lies = FileRows(file.fileno(), 0, 512, 144, 0)
            with pytest.raises(RuntimeError, match="has become shorter"):
                model.set_ends(None, norm, ("q4_k", lies))
        with pytest.raises(OSError, match="Bad file descriptor"):
            model.set_ends(None, norm, ("q4_k", lies))


@pytest.mark.parametrize("kind", ["q4_k", "q8_0", "bf16", "f32"])
def test_weights_that_are_read_from_the_file_are_those_of_memory(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries and keys have the rows of their pairs beside one another there."""
    file = model_file(tmp_path / "model.gguf", lambda _: kind, tied=False)
    found = load(file).forward([prompt(0, np.arange(40))])
    monkeypatch.setattr(StoredTensors, "in_file", lambda *_, **__: nullcontext())
    in_memory = load(file).forward([prompt(0, np.arange(40))])
    assert in_memory.tobytes() == found.tobytes()


def test_a_file_that_changes_while_it_is_loaded_is_named(tmp_path: Path) -> None:
    file = model_file(tmp_path / "model.gguf", mixed)

    def cut(done: float) -> None:
        if done > 0.5:
            os.truncate(file, file.stat().st_size // 2)

    with pytest.raises(CheckpointError, match=r"model\.gguf: has changed while it was read"):
        load(file, progress=cut)
