"""Tiny checkpoints with one tokenizer: a vocabulary so small that exact laws can be tabulated."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

VOCABULARY = 16
CONTEXT = 128
SPREAD = 2.0  # of a weight matrix, over the root of its width: the distributions are neither flat nor certain


def make_tiny(folder: Path, *, layers: int, width: int, astray: float = 0.0, context: int = CONTEXT) -> Path:
    """A random Llama checkpoint in float32; those of a shape are equal but for a share `astray` of other noise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about itself
        from transformers import AutoModelForCausalLM, LlamaConfig

    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 16,
        num_key_value_heads=width // 16,
        max_position_embeddings=context,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(shape)
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2 if "norm" in name else SPREAD / width**0.5)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=astray * float(parameter.std()))
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    words.save(str(folder / "tokenizer.json"))
    return folder
