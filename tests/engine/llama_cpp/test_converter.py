"""Files that llama.cpp's own converter wrote are the checkpoints that they were, in llama.cpp and in our own engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MambaConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from outrider.engine.checkpoints.checkpoint import copy_tokenizer, read_eos_ids, read_tokenizer_digest
from outrider.engine.loading import chosen_backend, load_engine
from outrider.errors import CheckpointError
from outrider.hub import Backend
from tests.engine.llama_cpp.converter import convert, quantize
from tests.engine.small_checkpoints import MODELS, Reference, prompt

VOCABULARY = 49_152
SHAPE: dict[str, Any] = {  # with rows of whole blocks of 256, for K quants
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": True,
}
# llama.cpp takes both from the number of layers, whatever the checkpoint has.
GEMMA: dict[str, Any] = {"layer_types": 3 * ["sliding_attention"], "query_pre_attn_scalar": 64, "sliding_window": 8}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    "gemma3": Gemma3TextConfig(**SHAPE, **GEMMA),
}
MAMBA = MambaConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2)

# Root mean square of a difference of logits, over their deviation: from the checkpoint's in float32, and between the
# engines, which round inputs in their own ways. That of two models that have nothing in common is 1.4.
ROUNDED = {"BF16": 0.03, "Q8_0": 0.1, "Q4_K_M": 0.5}
APART = {"BF16": 0.02, "Q8_0": 0.04, "Q4_K_M": 0.08}


def made(folder: Path, config: PreTrainedConfig) -> Path:
    """A random checkpoint with SmolLM2's tokenizer, which the converter knows by what it makes of a text."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.06)
    model.save_pretrained(folder)
    copy_tokenizer(MODELS / "smollm2-drafter.gguf", folder)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>"}  # no family's own class
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp(request.param), FAMILIES[request.param])


def converted(folder: Path, to: str) -> Path:
    """The checkpoint as a file, written at the first call."""
    file = folder / f"{to}.gguf"
    if not file.exists():
        if to == "Q4_K_M":
            quantize(converted(folder, "BF16"), file)
        else:
            convert(folder, file, to)
    return file


def logits(file: Path, backend: Backend, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    engine = load_engine(file, backend=backend, dtype="auto", slots=1, rows=100, threads=1)
    found = engine.forward([prompt(0, tokens)])
    engine.close()
    return found


def difference(found: NDArray[np.floating], expected: NDArray[np.floating]) -> float:
    return float(np.sqrt(np.square(found - expected).mean()) / expected.std())


@pytest.mark.parametrize("to", ROUNDED)
def test_logits_are_those_of_the_checkpoint(folder: Path, to: str) -> None:
    file = converted(folder, to)
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, 60)
    expected, theirs = Reference.load(folder).logits(tokens), logits(file, "llama.cpp", tokens)
    assert difference(theirs, expected) < ROUNDED[to]
    if chosen_backend(file, "auto") == "native":
        ours = logits(file, "native", tokens)
        assert difference(ours, expected) < ROUNDED[to]
        assert difference(ours, theirs) < APART[to]


def test_the_tokenizer_is_that_of_the_checkpoint(folder: Path) -> None:
    file = converted(folder, "BF16")
    assert read_tokenizer_digest(file) == read_tokenizer_digest(folder)
    assert set(read_eos_ids(folder)) <= set(read_eos_ids(file))


def test_a_model_with_a_state_is_refused(tmp_path: Path) -> None:
    file = converted(made(tmp_path, MAMBA), "BF16")
    with pytest.raises(CheckpointError, match="has a state that cannot be taken back"):
        load_engine(file, dtype="auto", slots=1, rows=100)
