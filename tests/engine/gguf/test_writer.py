"""Checkpoints become GGUF files: their shapes, tokenizers and types, and how near quantized weights are."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from outrider import _native
from outrider.cli.main import app
from outrider.engine.checkpoints.block_types import QUANTIZED, TYPES, dequantize
from outrider.engine.checkpoints.checkpoint import Weights, read_config, read_tokenizer, read_tokenizer_digest
from outrider.engine.checkpoints.gguf.header import GgufFile
from outrider.engine.checkpoints.gguf.recipes import recipe
from outrider.engine.checkpoints.gguf.writer import write_gguf
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.tensor_parallel.sharding import tensor_shapes
from outrider.errors import CheckpointError
from tests.engine.gguf.block_files import model_file
from tests.engine.gguf.small_files import model_metadata, model_tensors, write
from tests.engine.small_checkpoints import MODELS, SHAPES, make_checkpoint, prompt

# What quantized normal numbers err by, root mean square, over their deviation. With an offset or without, a group of n
# numbers spans some 4 deviations, in 2^bits steps, each of which errs by 1 / sqrt(12).
ERRORS = {"q8_0": 0.006, "q6_k": 0.02, "q5_k": 0.04, "q5_1": 0.04, "q5_0": 0.045}
FINEST = 2.0**-24 * 128 * 32  # a scale of six or eight bits is a multiple of a half, of which this is the smallest
ERRORS |= {"q4_k": 0.08, "q4_1": 0.08, "q4_0": 0.09}


def test_a_padded_file_has_its_sources_logits(tmp_path: Path) -> None:
    file = tmp_path / "padded.gguf"
    command = ["pad", str(MODELS / "drafter"), str(file), "--parameters", "20M", "--to", "F32"]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert read_config(file).layers > read_config(MODELS / "drafter").layers
    tokens = np.arange(40)
    settings = EngineSettings(dtype="float32", slots=1, rows=100)
    found, expected = (CpuEngine.load(it, settings).forward([prompt(0, tokens)]) for it in (file, MODELS / "drafter"))
    assert np.abs(found - expected).max() < 1e-3
    wrong = CliRunner().invoke(app, ["pad", str(MODELS / "drafter"), str(file), "--vocabulary", "9000"])
    assert wrong.exit_code == 2
    assert "a GGUF file has the vocabulary" in wrong.output


def quantized(kind: str, values: np.ndarray) -> np.ndarray:
    blocks = np.empty((len(values), TYPES[kind].row_bytes(values.shape[1])), np.uint8)
    _native.quantize(kind, values, blocks)
    return dequantize(kind, blocks)


@pytest.mark.parametrize("kind", ERRORS)
def test_quantized_weights_are_near_the_weights(kind: str) -> None:
    values = (0.05 * np.random.default_rng(1).standard_normal((64, 1024))).astype(np.float32)
    error = np.sqrt(((quantized(kind, values) - values) ** 2).mean()) / values.std()
    assert error < ERRORS[kind]
    plain = getattr(gguf.GGMLQuantizationType, kind.upper())
    if not kind.endswith("_k"):  # the format's package quantizes these
        theirs = gguf.quants.dequantize(gguf.quants.quantize(values, plain), plain)
        assert error < np.sqrt(((theirs - values) ** 2).mean()) / values.std()


@pytest.mark.parametrize("kind", ERRORS)
@given(st.data())
def test_quantized_weights_are_never_far_from_the_weights(kind: str, data: st.DataObject) -> None:
    """A step is the range of the block over its codes; a scale of six bits is off by a part of the largest."""
    numbers = st.floats(-100, 100, width=32)
    part = np.array(data.draw(st.lists(numbers, min_size=8, max_size=8)), np.float32)
    values = np.tile(part * data.draw(st.sampled_from([0.0, 0.01, 1.0])), 32)[None]
    span = float(values.max() - min(0.0, values.min())) + float(np.abs(values).max())
    bits = {"8": 8, "6": 6, "5": 5, "4": 4}[kind[1]]
    assert np.abs(quantized(kind, values) - values).max() <= span / 2 ** (bits - 1) + FINEST


def test_kinds_without_a_quantizer_and_rows_that_do_not_fit_are_refused() -> None:
    values = np.zeros((2, 256), np.float32)
    for kind in QUANTIZED:
        if kind not in ERRORS:
            with pytest.raises(ValueError, match=f"not quantized to {kind}"):
                quantized(kind, values)
    for rows, columns in ((2, 143), (1, 144)):
        with pytest.raises(ValueError, match="do not fill the rows"):
            _native.quantize("q4_k", values, np.zeros((rows, columns), np.uint8))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_written_checkpoint_is_the_model_that_it_was(shape: str, tmp_path: Path) -> None:
    folder, file = make_checkpoint(tmp_path / "folder", shape), tmp_path / "a.gguf"
    nothing = write(tmp_path / "nothing.gguf", model_metadata(), model_tensors())  # a file without a tokenizer
    write_gguf(folder, file, lambda name, shape: "f32", tokenizer=nothing)
    config, found = read_config(folder), read_config(file)
    kind = "llama" if config.model_type == "mistral" else config.model_type
    assert found == replace(config, model_type=kind, eos_ids=())
    source, weights = Weights(folder), Weights(file)
    for name, sizes in tensor_shapes(config, range(config.layers)).items():
        np.testing.assert_array_equal(weights.array(name, *sizes), source.array(name, *sizes))


@pytest.mark.parametrize("to", ["Q4_K_M", "Q8_0", "F16", "BF16"])
def test_a_folder_becomes_a_file_of_the_same_tokenizer(to: str, tmp_path: Path) -> None:
    folder, file = MODELS / "target", tmp_path / "a.gguf"
    config = read_config(folder)
    write_gguf(folder, file, recipe(to, config))
    assert replace(read_config(file), eos_ids=()) == replace(config, eos_ids=())
    assert set(config.eos_ids) <= set(read_config(file).eos_ids)
    assert read_tokenizer_digest(file) == read_tokenizer_digest(folder)
    ours, theirs = read_tokenizer(file)[0], read_tokenizer(folder)[0]
    for text in ("def add(a, b):\n    return a + b  # 12 items\n", "Ärger, 1234 \u2028 x", ""):
        assert ours.encode(text).ids == theirs.encode(text).ids
    read = gguf.GGUFReader(file)  # as the format's package reads it
    assert read.fields["tokenizer.ggml.tokens"].contents()[:3] == [theirs.id_to_token(id_) for id_ in range(3)]
    for tensor in read.tensors:
        assert GgufFile(file).tensors[tensor.name].kind == tensor.tensor_type.name.lower()
    source, weights = Weights(folder), Weights(file)
    for name, sizes in tensor_shapes(config, range(config.layers)).items():
        exact, near = (it.array(name, *sizes) for it in (source, weights))
        exact, near = (it.astype(np.float32) if it.dtype != np.uint16 else widened(it) for it in (exact, near))
        assert np.abs(near - exact).max() <= (0.15 if to == "Q4_K_M" else 0.02) * np.abs(exact).max()


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def test_types_are_those_of_llama_cpps_mixtures(tmp_path: Path) -> None:
    config = replace(read_config(model_file(tmp_path / "a.gguf", lambda _: "q8_0")), layers=16)
    kind_of, row = recipe("Q4_K_M", config), (256, 256)
    better = [layer for layer in range(16) if kind_of(f"blk.{layer}.ffn_down.weight", row) == "q6_k"]
    assert better == [0, 1, 4, 7, 10, 13, 14, 15]
    assert better == [layer for layer in range(16) if kind_of(f"blk.{layer}.attn_v.weight", row) == "q6_k"]
    assert kind_of("blk.0.attn_q.weight", row) == "q4_k"
    assert kind_of("token_embd.weight", row) == "q6_k"  # it is the head
    assert recipe("Q4_K_M", replace(config, tied=False))("token_embd.weight", row) == "q4_k"
    short = (256, 96)
    assert [kind_of(name, short) for name in ("blk.0.attn_q.weight", "blk.0.attn_v.weight")] == ["q5_0", "q8_0"]
    assert kind_of("blk.3.attn_q.weight", (256, 40)) == "f16"


def test_what_cannot_be_written_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "a.gguf"
    shutil.copytree(MODELS / "drafter", folder)
    parsed = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    for change, problem in (
        ({"model": {"type": "WordPiece", "vocab": {}}}, "only byte-level BPE"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "byte_fallback": True}}, "only byte-level BPE"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "no name for how it divides texts"),
        ({"added_tokens": [{"id": 5000, "content": "<x>"}]}, "has token 5000, the model a vocabulary of 4096"),
    ):
        (folder / "tokenizer.json").write_text(json.dumps(parsed | change), encoding="utf-8")
        with pytest.raises(CheckpointError, match=problem):
            write_gguf(folder, file, lambda name, shape: "f32")
    bad = model_file(tmp_path / "bad.gguf", lambda _: "f32")
    content = bytearray(bad.read_bytes())
    start = GgufFile(bad).tensors["blk.1.ffn_up.weight"].start
    content[start : start + 4] = np.array([np.nan], np.float32).tobytes()
    bad.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"up_proj.weight: has a weight that is no finite number"):
        write_gguf(bad, file, lambda name, shape: "f32")
    assert [it.name for it in tmp_path.iterdir() if "a.gguf" in it.name] == []


def test_the_command_writes_a_file_that_answers_as_its_folder_does(tmp_path: Path) -> None:
    file = tmp_path / "target.gguf"
    ran = CliRunner().invoke(app, ["quantize", str(MODELS / "target"), str(file), "--to", "Q8_0"])
    assert ran.exit_code == 0
    assert ran.output == f"outrider quantize: wrote {file}, {file.stat().st_size / 1e6:.1f} MB\n"
    tokens = np.arange(1, 200)
    settings = EngineSettings(dtype="float32", slots=1, rows=256, threads=1)
    exact = CpuEngine.load(MODELS / "target", settings).forward([prompt(0, tokens)])
    near = CpuEngine.load(file, replace(settings, dtype="stored")).forward([prompt(0, tokens)])
    assert 0 < np.sqrt(((near - exact) ** 2).mean()) / exact.std() < 0.05
    refused = CliRunner().invoke(app, ["quantize", str(MODELS / "target"), str(tmp_path / "target")])
    assert (refused.exit_code, "must end in .gguf" in refused.output) == (2, True)
