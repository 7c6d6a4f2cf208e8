"""Checkpoints as GGUF, read back by the format's own package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from bench.peers.gguf import write_gguf
from outrider.engine.checkpoints.checkpoint import Weights, read_config
from outrider.engine.checkpoints.padding import pad_checkpoint
from outrider.errors import CheckpointError
from tests.engine.small_checkpoints import make_checkpoint

MODELS = Path(__file__).parents[3] / "models"
TYPES = {gguf.GGMLQuantizationType.F32: torch.float32, gguf.GGMLQuantizationType.BF16: torch.bfloat16}


@dataclass
class Gguf:
    """A file's content."""

    values: dict[str, Any]
    tensors: dict[str, Tensor]


def read(path: Path) -> Gguf:
    reader = gguf.GGUFReader(path)
    tensors = {}
    for tensor in reader.tensors:
        dtype = TYPES[tensor.tensor_type]
        data = torch.from_numpy(tensor.data.copy()).view(dtype)
        tensors[tensor.name] = data.reshape([int(size) for size in tensor.shape[::-1]])
    values = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return Gguf(values, tensors)


def written(folder: Path, path: Path) -> Gguf:
    write_gguf(folder, path)
    return read(path)


def test_the_reference_target_is_read_back(tmp_path: Path) -> None:
    found = written(MODELS / "target", tmp_path / "target.gguf")
    weights = Weights(MODELS / "target")
    assert found.values == {
        "general.architecture": "llama",
        "llama.vocab_size": 4096,
        "llama.context_length": 1024,
        "llama.embedding_length": 256,
        "llama.block_count": 6,
        "llama.feed_forward_length": 704,
        "llama.attention.head_count": 8,
        "llama.attention.head_count_kv": 4,
        "llama.attention.key_length": 64,
        "llama.attention.value_length": 64,
        "llama.attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "llama.rope.dimension_count": 64,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "no_vocab",
    }
    assert len(found.tensors) == 2 + 9 * 6
    for name, source, shape, dtype in (
        ("token_embd.weight", "model.embed_tokens.weight", (4096, 256), torch.bfloat16),
        ("output_norm.weight", "model.norm.weight", (256,), torch.float32),
        ("blk.5.attn_norm.weight", "model.layers.5.input_layernorm.weight", (256,), torch.float32),
        ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight", (256, 256), torch.bfloat16),
        ("blk.3.attn_output.weight", "model.layers.3.self_attn.o_proj.weight", (256, 512), torch.bfloat16),
        ("blk.5.ffn_gate.weight", "model.layers.5.mlp.gate_proj.weight", (704, 256), torch.bfloat16),
        ("blk.5.ffn_down.weight", "model.layers.5.mlp.down_proj.weight", (256, 704), torch.bfloat16),
    ):
        assert found.tensors[name].dtype == dtype, name
        assert torch.equal(found.tensors[name], weights.take(source, *shape).to(dtype)), name


@pytest.mark.parametrize(("name", "heads"), [("q", 8), ("k", 4)])
def test_the_two_numbers_that_rope_turns_become_neighbours(tmp_path: Path, name: str, heads: int) -> None:
    found = written(MODELS / "drafter", tmp_path / "drafter.gguf").tensors[f"blk.1.attn_{name}.weight"]
    source = Weights(MODELS / "drafter").take(f"model.layers.1.self_attn.{name}_proj.weight", heads * 64, 256)
    for head in range(heads):
        mine, theirs = source[head * 64 : (head + 1) * 64], found[head * 64 : (head + 1) * 64]
        assert torch.equal(theirs[0::2], mine[:32])
        assert torch.equal(theirs[1::2], mine[32:])


def test_a_padded_target_keeps_all_ids_and_its_own_eps(tmp_path: Path) -> None:
    pad_checkpoint(MODELS / "drafter", tmp_path / "padded", shape="tiny")
    config = read_config(tmp_path / "padded")
    found = written(tmp_path / "padded", tmp_path / "padded.gguf")
    assert (config.unpadded_vocabulary, config.vocabulary) == (4096, 6000)
    assert found.values["llama.vocab_size"] == 6000
    assert found.values["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(config.eps)
    assert found.tensors["token_embd.weight"].shape == found.tensors["output.weight"].shape == (6000, 512)
    norm = Weights(tmp_path / "padded").take("model.norm.weight", 512)
    assert norm.dtype == torch.float32  # the norm's scale is no power of 4
    assert torch.equal(found.tensors["output_norm.weight"], norm)


def test_biases_and_scaled_rope_frequencies_are_written(tmp_path: Path) -> None:
    biased = written(make_checkpoint(tmp_path / "biased", "biased"), tmp_path / "biased.gguf").tensors
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        assert biased[f"blk.0.{name}.bias"].dtype == torch.float32
    assert "rope_freqs.weight" not in biased
    scaled = make_checkpoint(tmp_path / "scaled", "one-kv-head-llama3")
    divisors = written(scaled, tmp_path / "scaled.gguf").tensors["rope_freqs.weight"]
    assert divisors.shape == (8,)
    assert divisors[0] == 1.0
    assert divisors[-1] == pytest.approx(4.0)  # the factor, for the lowest frequency


def test_weights_may_stay_float32(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "small", "grouped")
    write_gguf(folder, tmp_path / "small.gguf", "float32")
    found = read(tmp_path / "small.gguf").tensors["blk.2.ffn_up.weight"]
    assert torch.equal(found, Weights(folder).take("model.layers.2.mlp.up_proj.weight", 99, 64))


def test_a_family_that_the_architecture_does_not_cover_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "qwen", "qwen3")
    with pytest.raises(CheckpointError, match="only models of type llama and mistral"):
        write_gguf(folder, tmp_path / "qwen.gguf")
    assert not (tmp_path / "qwen.gguf").exists()
