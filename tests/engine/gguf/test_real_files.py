"""Files that other people made: read as the format's package and llama.cpp read them."""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.engine.checkpoints.checkpoint import (
    Weights,
    read_config,
    read_eos_ids,
    read_outline,
    read_tokenizer,
    read_tokenizer_digest,
)
from outrider.engine.checkpoints.gguf.header import GgufFile
from outrider.engine.checkpoints.gguf.tokenizer import gguf_tokenizer_json
from outrider.engine.interface.batch import Segment
from outrider.engine.loading import chosen_backend, load_engine, outline
from outrider.engine.tensor_parallel.sharding import tensor_shapes
from outrider.errors import CheckpointError
from router.requests.chat_template import TemplateMessage
from router.requests.served_models import load_model
from tests.engine.gguf.nasty_texts import TEXTS
from tests.engine.gguf.real_files import GEMMA3, SMOLLM2, RealFile, real_file

# SHA-256 of the ids, in JSON, that llama.cpp (llama-cpp-python 0.3.36) makes of TEXTS with these files.
LLAMA_CPP = {SMOLLM2: "d9978df8298e3e64", GEMMA3: "32a4c5b59f08ca1d"}


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return real_file(SMOLLM2)


@pytest.fixture(scope="module")
def gemma3() -> Path:
    return real_file(GEMMA3)


def test_the_header_is_what_the_formats_package_reads(smollm2: Path) -> None:
    found, reader = GgufFile(smollm2), gguf.GGUFReader(smollm2)
    values = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    read = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in found.metadata.items()}
    assert read == values
    tensors = {it.name: (it.tensor_type.name.lower(), it.data_offset, it.n_bytes) for it in reader.tensors}
    assert {name: (it.kind, it.start, it.stop - it.start) for name, it in found.tensors.items()} == tensors


def test_a_vocabulary_of_262144_is_read_in_half_a_second(gemma3: Path) -> None:
    began = time.process_time()
    assert len(GgufFile(gemma3).metadata["tokenizer.ggml.tokens"]) == 262_144
    assert time.process_time() - began < 0.5
    began = time.process_time()
    assert len(read_tokenizer_digest(gemma3)) == 16
    assert time.process_time() - began < 1


@pytest.mark.parametrize("real", LLAMA_CPP, ids=lambda real: real.name)
def test_texts_become_the_tokens_of_llama_cpp(real: RealFile) -> None:
    tokenizer, _ = read_tokenizer(real_file(real))
    ids = [tokenizer.encode(one).ids for one in TEXTS]
    assert hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16] == LLAMA_CPP[real]
    for one in TEXTS:
        assert tokenizer.decode(tokenizer.encode(one, add_special_tokens=False).ids, skip_special_tokens=False) == one


def test_weights_are_those_of_the_formats_package(smollm2: Path) -> None:
    config, weights = read_config(smollm2), Weights(smollm2)
    shapes = tensor_shapes(config, range(config.layers))
    assert {*shapes} == {*weights.files}
    for name, shape in shapes.items():
        weights.check(name, *shape)
    for name, source in (("mlp.down_proj", "ffn_down"), ("self_attn.v_proj", "attn_v")):
        stored = next(it for it in gguf.GGUFReader(smollm2).tensors if it.name == f"blk.7.{source}.weight")
        values = gguf.quants.dequantize(stored.data, stored.tensor_type)
        full = f"model.layers.7.{name}.weight"
        np.testing.assert_array_equal(weights.array(full, *shapes[full]), values)
        assert weights.kind(full) == "q4_1"
        np.testing.assert_array_equal(weights.blocks(full, *shapes[full]), stored.data)


# A prompt, what follows it, and a token that ends texts. Gemma's file is of the base model, which goes on with a text.
CHAT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
TEXTS_OF = {
    SMOLLM2: (CHAT, "The capital of France is Paris.", "<|im_end|>"),
    GEMMA3: ("One, two, three, four, five,", " six, seven, eight", "<end_of_turn>"),
}


@pytest.mark.parametrize("real", TEXTS_OF, ids=lambda real: real.name)
def test_a_small_model_answers(real: RealFile) -> None:
    path = real_file(real)
    assert chosen_backend(path, "auto") == "native"
    engine = load_engine(path, dtype="stored", slots=1, rows=128, threads=2)
    tokenizer, digest = read_tokenizer(path)
    assert engine.tokenizer_digest == digest
    prompt, expected, end = TEXTS_OF[real]
    assert tokenizer.token_to_id(end) in engine.eos_ids
    tokens, done, answer = tokenizer.encode(prompt).ids, 0, list[int]()
    while not answer or (answer[-1] not in engine.eos_ids and len(answer) < 20):
        rows = np.array(tokens, np.int64)
        logits = engine.forward([Segment(0, done, rows, np.arange(done, done + len(rows), dtype=np.int64))])
        done += len(rows)
        tokens = [int(logits[-1].argmax())]
        answer += tokens
    assert tokenizer.decode(answer).startswith(expected)


async def test_a_router_writes_prompts_with_the_template_of_the_file(smollm2: Path) -> None:
    model = load_model("smol", smollm2)
    try:
        assert model.eos_ids == read_eos_ids(smollm2) == (2, 0)
        ids = await model.encode_chat([TemplateMessage("user", "Hi <|im_end|>")])
        text = model.tokenizer.decode(ids, skip_special_tokens=False)
        assert text.endswith("<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n")
        assert list(ids).count(2) == 2  # the user's is text
    finally:
        model.close()


def test_the_outline_of_a_file(gemma3: Path) -> None:
    found = read_outline(gemma3)
    assert (found.model_type, found.vocabulary, found.context) == ("gemma3", 262_144, 32_768)
    assert (outline(gemma3).vocabulary, outline(gemma3).context) == (262_144, 32_768)
    weights = Weights(gemma3)
    assert {weights.kind(name) for name in weights.files} == {"f32", "q4_k", "q5_0", "q6_k", "q8_0"}
    for name in weights.files:
        if "layers.3." in name or "blk.3." in name:
            assert np.isfinite(weights.array(name, *weights.shape(name))).all()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_headers(smollm2: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Each is refused, or read within bounds; what is around its header does not count."""
    whole = GgufFile(smollm2)
    end = min(it.start for it in whole.tensors.values())
    with smollm2.open("rb") as file:
        damaged = bytearray(file.read(end))
    # Lengths, types and numbers of the first metadata, of an array, and of tensors.
    places = st.integers(0, 2_000) | st.integers(0, end - 1) | st.integers(end - 20_000, end - 1)
    bits = st.binary(min_size=1, max_size=1) | st.sampled_from(
        [b"\xff" * 8, bytes(8), b"\xff\xff\xff\x7f", b"\x09\0\0\0"]
    )
    for at in data.draw(st.lists(places, min_size=1, max_size=3)):
        replaced = data.draw(bits)
        damaged[at : at + len(replaced)] = replaced
    path = tmp_path / "a.gguf"
    path.write_bytes(damaged[:end])
    os.truncate(path, data.draw(st.sampled_from([smollm2.stat().st_size, end, end // 2])))
    began = time.process_time()
    with suppress(CheckpointError):
        found = GgufFile(path)
        for tensor in found.tensors.values():
            assert 0 <= tensor.start <= tensor.stop <= path.stat().st_size
        read_config(path)
        gguf_tokenizer_json(found)
    assert time.process_time() - began < 1
