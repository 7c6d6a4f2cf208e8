"""A GGUF file is the model that the same safetensors are; what is not served, or contradicts itself, is refused."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.peers.gguf import write_gguf
from outrider.engine.checkpoints.block_types import dequantize
from outrider.engine.checkpoints.checkpoint import Weights, read_config, read_eos_ids, read_outline
from outrider.engine.checkpoints.gguf.config import kv_values
from outrider.engine.checkpoints.gguf.header import read_gguf
from outrider.engine.checkpoints.model_card import weights_digest
from outrider.engine.checkpoints.rope import Llama3Scaling
from outrider.engine.checkpoints.stored_tensors import ALL
from outrider.engine.tensor_parallel.sharding import tensor_shapes
from outrider.engine.transformers.pretrained import from_pretrained
from outrider.engine.transformers.quiet import quiet
from outrider.errors import CheckpointError
from tests.engine.gguf.small_files import (
    CONTROL,
    HEADS,
    KV_HEADS,
    LAYERS,
    NORMAL,
    USER_DEFINED,
    VOCABULARY,
    WIDTH,
    Made,
    Typed,
    model_metadata,
    model_tensors,
    write,
)
from tests.engine.small_checkpoints import SHAPES, make_checkpoint

LLAMAS = [shape for shape in SHAPES if not shape.startswith("qwen")]


@pytest.mark.parametrize("shape", LLAMAS)
def test_a_converted_checkpoint_is_the_model_that_it_was(tmp_path: Path, shape: str) -> None:
    folder, file = make_checkpoint(tmp_path / "folder", shape), tmp_path / "a.gguf"
    write_gguf(folder, file, "float32")
    config, found = read_config(folder), read_config(file)
    assert found == replace(config, model_type="llama", eos_ids=())
    source, weights = Weights(folder), Weights(file)
    for name, sizes in tensor_shapes(config, range(config.layers)).items():
        assert weights.kind(name) == source.kind(name) == "f32"
        for rows in (ALL, slice(3, 7), slice(0, 0)):
            np.testing.assert_array_equal(weights.array(name, *sizes, rows=rows), source.array(name, *sizes, rows=rows))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_the_families(tmp_path: Path, architecture: str) -> None:
    tensors = model_tensors(architecture, tied=architecture != "qwen3")
    file = write(tmp_path / "a.gguf", model_metadata(architecture), tensors)
    config = read_config(file)
    assert (config.model_type, config.qkv_bias, config.head_norms) == (
        architecture,
        architecture == "qwen2",
        architecture == "qwen3",
    )
    assert config.tied == (architecture != "qwen3")
    assert (config.eps, config.rope.theta, config.vocabulary, config.ffn) == (1e-5, 1e6, VOCABULARY, 96)
    weights = Weights(file)
    assert {*tensor_shapes(config, range(2))} == {*weights.files}
    for name, shape in tensor_shapes(config, range(2)).items():
        weights.check(name, *shape)
    outline = read_outline(file)
    assert (outline.model_type, outline.vocabulary, outline.context) == (architecture, VOCABULARY, 256)


def test_blocks_and_their_values(tmp_path: Path) -> None:
    weights = Weights(write(tmp_path / "a.gguf", model_metadata(), made := model_tensors()))
    for name, source in (("mlp.down_proj", "ffn_down"), ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k")):
        full, tensor = f"model.layers.1.{name}.weight", made[f"blk.1.{source}.weight"]
        assert weights.kind(full) == "q8_0"
        rows = np.frombuffer(tensor.content or b"", np.uint8).reshape(tensor.shape[0], -1)
        if name != "mlp.down_proj":  # neighbours are pairs; in checkpoints they are half a head apart
            rows = rows.reshape(-1, 8, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
        blocks = weights.blocks(full, *tensor.shape)
        np.testing.assert_array_equal(blocks, rows)
        np.testing.assert_array_equal(weights.array(full, *tensor.shape), dequantize("q8_0", rows))
        part = weights.blocks(full, *tensor.shape, rows=slice(5, 21), columns=slice(32, 64))
        np.testing.assert_array_equal(part, rows[5:21, 34:68])
        part = weights.array(full, *tensor.shape, rows=slice(5, 21), columns=slice(7, 9))
        np.testing.assert_array_equal(part, dequantize("q8_0", rows)[5:21, 7:9])
        with pytest.raises(CheckpointError, match=f"tensor {full} cannot be divided at columns 0 and 48: it is q8_0"):
            weights.blocks(full, *tensor.shape, columns=slice(0, 48))
    with pytest.raises(ValueError, match=r"model.norm.weight is f32, and has no blocks"):
        weights.blocks("model.norm.weight", WIDTH)


def test_progress_and_digest(tmp_path: Path) -> None:
    file, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    seen: list[float] = []
    weights = Weights(write(file, model_metadata(), model_tensors()), seen.append)
    for name, shape in tensor_shapes(read_config(file), range(2)).items():
        weights.array(name, *shape)
    weights.finish()
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert seen[-2] > 0.9
    write(other, {**model_metadata(), "general.name": "x"}, model_tensors())
    assert weights_digest(file) == weights_digest(other)
    assert weights_digest(file) != weights_digest(write(other, model_metadata(), model_tensors(kind="f16")))


def refused(path: Path, metadata: Any, tensors: Any = None) -> str:
    write(path, metadata, model_tensors() if tensors is None else tensors)
    with pytest.raises(CheckpointError) as error:
        read_config(path)
    assert str(error.value).startswith(f"{path}: ")
    return str(error.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (
            {"architecture": "mamba"},
            "metadata general.architecture is 'mamba', must be one of llama, qwen2, qwen3, gemma2",
        ),
        ({"general__architecture": 3}, "metadata general.architecture is 3, must be a text"),
        ({"context_length": None}, "metadata lack llama.context_length, which must be a positive integer"),
        ({"context_length": 0}, "metadata llama.context_length is 0, must be a positive integer"),
        ({"context_length": 1 << 30}, "metadata llama.context_length is 1073741824, must be at most"),
        ({"block_count": 3}, "metadata llama.block_count is 3, must be 2, the number of layers that it has tensors of"),
        ({"block_count": 1 << 20}, "metadata llama.block_count is 1048576, must be at most"),
        ({"embedding_length": 128}, "tensor token_embd.weight has shape [70, 64], metadata llama.embedding_length is"),
        ({"head_count_kv": 3}, "metadata llama.attention.head_count_kv is 3, must be a divisor of head_count (4)"),
        ({"head_count_kv": [1, 2]}, "metadata llama.attention.head_count_kv is an array of 2, must be a positive"),
        ({"attention__key_length": 15}, "metadata llama.attention.key_length is 15, must be even"),
        (
            {"attention__value_length": 32},
            "metadata llama.attention.value_length is 32, must be 16, as",
        ),
        ({"rope__dimension_count": 8}, "metadata llama.rope.dimension_count is 8, must be 16"),
        ({"rms_epsilon": 2.0}, "metadata llama.attention.layer_norm_rms_epsilon is 2.0, must be a number from 0 to 1"),
        ({"rms_epsilon": float("nan")}, "metadata llama.attention.layer_norm_rms_epsilon is nan, must be a positive"),
        ({"rope__freq_base": "x"}, "metadata llama.rope.freq_base is 'x', must be a positive number"),
        (
            {"rope__scaling.type": "yarn"},
            "metadata llama.rope.scaling.type is 'yarn', must be absent: of",
        ),
        ({"rope__scale_linear": 4.0}, "metadata llama.rope.scale_linear is 4.0, must be absent"),
        (
            {"rope__scaling.factor": [1.0]},
            "metadata llama.rope.scaling.factor is an array of 1, must be a single",
        ),
        ({"expert_count": 8}, "metadata llama.expert_count is 8, must be 0: mixtures of experts are not served"),
        ({"vocab_size": 71}, "metadata llama.vocab_size is 71, must be 70, the rows of the embedding"),
    ],
)
def test_metadata_that_are_refused(tmp_path: Path, changes: dict[str, Any], error: str) -> None:
    assert refused(tmp_path / "a.gguf", model_metadata(**changes)).startswith(error)


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({}, LAYERS * KV_HEADS * 2 * (WIDTH // HEADS)),
        ({"head_count_kv": None}, LAYERS * HEADS * 2 * (WIDTH // HEADS)),
        ({"head_count_kv": [0, 3], "key_length": 8, "value_length": 5}, 3 * (8 + 5)),
        ({"head_count_kv": None, "head_count": 0}, 0),  # as Mamba's
    ],
)
def test_numbers_in_the_keys_and_values_of_a_token(tmp_path: Path, changes: dict[str, Any], values: int) -> None:
    changes = {f"attention__{name}": value for name, value in changes.items()}
    assert kv_values(read_gguf(write(tmp_path / "a.gguf", model_metadata(**changes), {}))) == values


@pytest.mark.parametrize("heads", [None, "x", [1, 2, 3], Typed(5, struct.pack("<i", -1))])
def test_numbers_of_heads_that_are_refused(tmp_path: Path, heads: Any) -> None:
    changes = {"attention__head_count_kv": heads, "attention__head_count": None}
    file = read_gguf(write(tmp_path / "a.gguf", model_metadata(**changes), {}))
    with pytest.raises(CheckpointError, match=r"head_count_kv.* must be a number, or 2 numbers"):
        kv_values(file)


def test_a_vocabulary_that_differs_from_its_embedding(tmp_path: Path) -> None:
    def tokens(count: int) -> dict[str, Any]:
        return {**model_metadata(), "tokenizer.ggml.tokens": [f"t{number}" for number in range(count)]}

    file = tmp_path / "a.gguf"
    assert refused(file, tokens(VOCABULARY + 1)).startswith("has 71 tokens and an embedding of 70 rows; the two must")
    write(file, tokens(VOCABULARY - 6), model_tensors())  # padded, as families do
    assert read_config(file).vocabulary == read_outline(file).vocabulary == VOCABULARY
    tensors = model_tensors() | {"token_embd.weight": Made("f16", (4096, WIDTH))}
    assert refused(file, tokens(VOCABULARY), tensors).startswith("has 70 tokens and an embedding of 4096 rows")
    without = {name: it for name, it in model_tensors().items() if name != "token_embd.weight"}
    assert refused(file, tokens(VOCABULARY), without).startswith("tensor token_embd.weight is missing")
    one = {**model_metadata(), "tokenizer.ggml.tokens": 7}
    assert refused(file, one) == "metadata tokenizer.ggml.tokens is 7, must be an array of texts"


def test_tensors_that_contradict_metadata(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", model_metadata(feed_forward_length=80), model_tensors())
    weights, config = Weights(file), read_config(file)
    name, shape = "model.layers.0.mlp.up_proj.weight", (80, WIDTH)
    assert tensor_shapes(config, [0])[name] == shape
    with pytest.raises(CheckpointError, match=r"up_proj.weight has shape \[96, 64\], its metadata makes it \[80, 64\]"):
        weights.check(name, *shape)
    with pytest.raises(CheckpointError, match=r"a.gguf: tensor lm_head.weight is missing"):
        weights.check("lm_head.weight", 1, 1)


@pytest.mark.parametrize(("kind", "nearest"), [("iq2_xs", "q2_k"), ("tq1_0", "q2_k"), ("iq3_s", "q3_k")])
def test_a_type_that_is_not_served(tmp_path: Path, kind: str, nearest: str) -> None:
    tensors = {
        "output.weight": Made(kind, (3, 256)),
        "output_norm.weight": Made("q8_0", (256,)),
        "token_embd.weight": Made("f64", (3, 256)),
    }
    weights = Weights(write(tmp_path / "a.gguf", model_metadata(), tensors))
    with pytest.raises(
        CheckpointError, match=r"tensor model.embed_tokens.weight is float64, must be bfloat16, float16"
    ):
        weights.array("model.embed_tokens.weight", 3, 256)
    with pytest.raises(CheckpointError, match=rf"tensor lm_head.weight is {kind}, .*take a file in {nearest}, the nea"):
        weights.array("lm_head.weight", 3, 256)
    with pytest.raises(CheckpointError, match=r"tensor model.norm.weight is q8_0, must be f32: it is no matrix"):
        weights.array("model.norm.weight", 256)


def test_llama_3s_scaling_is_found_again(tmp_path: Path) -> None:
    for factor, original in ((8.0, 8192.0), (32.0, 8192.0), (4.0, 64.0)):
        scaling = Llama3Scaling(factor, 1.0, 4.0, original)
        file = tmp_path / "a.gguf"
        rope = read_config(write(file, model_metadata(), model_tensors())).rope
        divisors = rope.frequencies(16) / replace(rope, scaling=scaling).frequencies(16)
        freqs = {"rope_freqs.weight": Made("f32", (8,), divisors.astype(np.float32).tobytes())}
        found = read_config(write(file, model_metadata(), model_tensors() | freqs)).rope.scaling
        assert found == scaling
        divisors[3] *= 1.01
        freqs = {"rope_freqs.weight": Made("f32", (8,), divisors.astype(np.float32).tobytes())}
        assert refused(file, model_metadata(), model_tensors() | freqs).startswith("tensor rope_freqs.weight has other")
    wrong = {"rope_freqs.weight": Made("f16", (8,))}
    assert "is f16 of shape [8], must be f32 of [8]" in refused(file, model_metadata(), model_tensors() | wrong)


def test_ends_of_texts(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"

    def found(*tokens: tuple[str, int], **named: Any) -> tuple[int, ...]:
        names, kinds = [name for name, _ in tokens], [kind for _, kind in tokens]
        ids = {f"tokenizer.ggml.{key}_token_id": value for key, value in named.items()}
        filled = {
            "tokens": names + ["x"] * (VOCABULARY - len(names)),
            "token_type": kinds + [1] * (VOCABULARY - len(kinds)),
        }
        vocabulary = {f"tokenizer.ggml.{key}": value for key, value in filled.items()}
        write(file, {**model_metadata(), **vocabulary, **ids}, model_tensors())
        return read_eos_ids(file)

    assert found(("a", NORMAL), ("b", NORMAL), eos=1) == (1,)
    assert found(eos=1, eot=2, eom=3) == (1, 2, 3)
    assert found(eos=0xFFFFFFFF) == ()
    assert found(("<|im_end|>", CONTROL), ("<|endoftext|>", USER_DEFINED), ("<|eot_id|>", NORMAL), eos=1) == (1, 0)
    assert 0 in found(("<|end|>", CONTROL), ("<|return|>", CONTROL))
    assert 0 not in found(("<|end|>", CONTROL), ("<|return|>", CONTROL), ("<|call|>", CONTROL))
    with pytest.raises(CheckpointError, match=r"tokenizer.ggml.eos_token_id is 99, must be the id of a token"):
        found(eos=99)
    with pytest.raises(CheckpointError, match=r"tokenizer.ggml.eot_token_id is 'x', must be the id of a token"):
        found(eot="x")


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])  # of qwen3 it does not take the size of heads
def test_transformers_reads_the_same_model(tmp_path: Path, architecture: str) -> None:
    """Names, the order of rows and the configuration, by somebody else's reader."""
    file = write(
        tmp_path / "a.gguf",
        {
            **model_metadata(
                architecture,
                vocab_size=VOCABULARY,
            ),
            "tokenizer.ggml.tokens": [f"t{number}" for number in range(VOCABULARY)],
        },
        model_tensors(architecture, "f32", tied=False),
    )
    config, weights = read_config(file), Weights(file)
    with quiet():
        model = from_pretrained(file, dtype=torch.float32)
    found = dict(model.named_parameters())
    shapes = tensor_shapes(config, range(config.layers))
    assert {*found} == {*shapes}
    for name, sizes in shapes.items():
        np.testing.assert_array_equal(weights.array(name, *sizes), found[name].detach().numpy())
    it = model.config
    assert (it.num_hidden_layers, it.num_attention_heads, it.num_key_value_heads) == (2, config.heads, config.kv_heads)
    assert (it.rms_norm_eps, it.rope_parameters["rope_theta"]) == (pytest.approx(config.eps), config.rope.theta)
    assert it.vocab_size == config.vocabulary
