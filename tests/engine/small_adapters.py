"""Small random adapters, made and saved by PEFT."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from outrider.engine.adapters.low_rank import MODULES
from outrider.engine.interface.engine import Engine
from tests.engine.small_checkpoints import Reference, adapted, assert_same, make_checkpoint, prompt, random_tokens


@contextmanager
def quiet() -> Iterator[None]:
    """PEFT calls what transformers is about to remove."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def make_adapter(
    checkpoint: Path,
    folder: Path,
    *,
    seed: int = 1,
    modules: Sequence[str] = tuple(MODULES),
    rank: int = 4,
    deviation: float = 0.15,
    **terms: Any,
) -> Path:
    """A random adapter for a checkpoint, whose effect on its logits is about as large as they are."""
    torch.manual_seed(seed)
    with quiet(), torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        adapted = get_peft_model(model, LoraConfig(r=rank, target_modules=[*modules], **{"lora_alpha": 8, **terms}))
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, deviation)
        adapted.save_pretrained(str(folder))
    return folder


def load_peft(checkpoint: Path, adapter: Path) -> Any:
    """A checkpoint with an adapter, by transformers and PEFT."""
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        return PeftModel.from_pretrained(model, str(adapter)).eval()


def adapted_logits(checkpoint: Path, adapter: Path, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """The logits of a text by transformers and PEFT, computed in float64: [tokens, vocabulary]."""
    with quiet(), torch.no_grad():
        adapted = load_peft(checkpoint, adapter).double()
        found: NDArray[np.float64] = adapted(torch.tensor([tokens.tolist()])).logits[0].numpy()
    return found


def make_adapters(checkpoint: Path, folder: Path) -> list[Path]:
    """An adapter of all linears, and those of some with other ranks."""
    of_some: list[dict[str, Any]] = [
        {},
        {"modules": ("q_proj", "v_proj"), "rank": 20},
        {"modules": ("k_proj", "gate_proj", "down_proj"), "rank": 33},
    ]
    return [make_adapter(checkpoint, folder / str(seed), seed=seed, **changes) for seed, changes in enumerate(of_some)]


def assert_logits_of_peft(load: Callable[[Path], Engine], shape: str, folder: Path) -> None:
    """An engine's logits with an adapter of all linears are PEFT's, for a shape of model."""
    checkpoint = make_checkpoint(folder / "model", shape)
    adapter = make_adapter(checkpoint, folder / "adapter")
    engine = load(checkpoint)
    text = random_tokens(engine, np.random.default_rng(1), 50)
    changed, read = engine.load_adapter(adapter)
    assert read.rank == 4
    expected = adapted_logits(checkpoint, adapter, text)
    assert np.abs(expected - Reference.load(checkpoint).logits(text)).max() > 0.5  # the adapter has an effect
    assert_same(engine.forward([adapted(prompt(0, text), changed)]), expected)
