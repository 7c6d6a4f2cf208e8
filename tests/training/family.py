"""A tiny family to train: a tokenizer of some pages of ours, and a target of random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from outrider.training.data.vocabulary import make_tokenizer
from outrider.training.distillation import Training
from outrider.training.recipe import DrafterRecipe, TokenizerRecipe, TrainingRecipe

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "models" / "target"
PAGES = ROOT / "docs"
SHAPE: dict[str, Any] = {"width": 32, "depth": 1, "heads": 2, "ffn": 48}


def make_target(folder: Path, layers: int = 3) -> Path:
    """With a tokenizer of 300 tokens, in float32; decided enough that there is something to learn."""
    make_tokenizer(TokenizerRecipe(text=(str(PAGES),), pattern="*.md", output=folder, vocabulary=300))
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder)
    return folder


def recipe(target: Path, output: Path, /, **changes: Any) -> DrafterRecipe:
    """Sixteen steps of 128 tokens, on one thread."""
    settings: dict[str, Any] = {
        "text": (str(PAGES),),
        "pattern": "*.md",
        "target": target,
        "output": output,
        "layers": (0, 2),
        "window": 32,
        "batch": 4,
        "tokens": 16 * 128,
        "warm_up": 0.1,
        "learning_rate": 3e-3,
        "measure_steps": 8,
        "threads": 1,
        "precision": "float32",
    }
    return DrafterRecipe(**settings | changes)


def begin(settings: TrainingRecipe) -> Training:
    return Training(settings, lambda what, done: None)


def train(settings: TrainingRecipe, steps: int | None = None) -> Training:
    """To its end, or for `steps` steps and saved."""
    training = begin(settings)
    for now in training.run():
        if now.step == steps:
            training.save()
            break
    return training
