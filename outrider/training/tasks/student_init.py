"""Creates the student of a training: from layers of the target, random weights of a shape, or a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, LlamaConfig

from outrider.engine.checkpoints.model_config import DRAFT_IDS
from outrider.engine.interface.engine import Dtype
from outrider.engine.tensor_parallel.group import ALONE
from outrider.engine.transformers.pretrained import NO_HUB_KERNELS, Pretrained
from outrider.engine.transformers.quiet import quiet
from outrider.errors import CheckpointError, ConfigError, TokenizerMismatch
from outrider.hub import checkpoint_folder
from outrider.training.data.corpus import Vocabulary
from outrider.training.recipe import DrafterRecipe

_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")  # in the names of a model's tensors


def load(folder: Path, dtype: Dtype) -> Pretrained:
    """Load a checkpoint through transformers. Raises CheckpointError, which names the folder."""
    try:
        with quiet():
            return Pretrained.load(folder, dtype, ALONE.shard)
    except CheckpointError as error:
        text = str(error)
        raise CheckpointError(text if text.startswith(str(folder)) else f"{folder}: {text}") from None


def make_student(recipe: DrafterRecipe, target: Pretrained | None, vocabulary: Vocabulary) -> Any:
    """Return the model to train, in float32, before the first step.

    Raises ConfigError for an impossible shape, CheckpointError for a checkpoint that cannot be loaded, and
    TokenizerMismatch for a checkpoint with another tokenizer.
    """
    torch.manual_seed(recipe.seed)
    if recipe.start is not None:
        student = _from_checkpoint(recipe.start, target, vocabulary)
    elif recipe.width is not None:
        student = _from_shape(recipe, target, vocabulary)
    else:
        assert target is not None  # the recipe checks this
        student = _from_layers(target.model, recipe.layers)
    context = getattr(student.config.get_text_config(), "max_position_embeddings", None) or recipe.window
    for whose, longest in (("the drafter", context), ("the target", target.context if target else context)):
        if recipe.window > longest:
            raise ConfigError(f"window: {recipe.window} is more than {whose}'s context of {longest} tokens")
    return student.train()


def _from_checkpoint(folder: Path, target: Pretrained | None, vocabulary: Vocabulary) -> Any:
    found = load(checkpoint_folder(folder), "float32")
    if found.tokenizer_digest != vocabulary.digest:
        raise TokenizerMismatch(f"{folder}: its tokenizer is not the target's; start from a model that has that one")
    if target is not None and found.vocabulary != target.vocabulary:
        raise TokenizerMismatch(
            f"{folder}: its vocabulary has {found.vocabulary:,} tokens, the target's {target.vocabulary:,}; start from "
            "a checkpoint with the same number"
        )
    return found.model


def _from_layers(target: Any, kept: tuple[int, ...]) -> Any:
    """Return a model with the target's embedding, norm and head, and the layers `kept`, or its first two and its last.

    Raises ConfigError for a layer that the target does not have.
    """
    config = type(target.config).from_dict(target.config.to_dict())
    of_text = config.get_text_config()
    layers = of_text.num_hidden_layers
    kept = kept or tuple(sorted({0, min(1, layers - 1), layers - 1}))
    if wrong := [layer for layer in kept if layer >= layers]:
        raise ConfigError(f"layers: the target has {layers}, counted from 0; it has no layer {wrong[0]}")
    of_text.num_hidden_layers = len(kept)
    if getattr(of_text, "layer_types", None):
        of_text.layer_types = [of_text.layer_types[layer] for layer in kept]
    student = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **NO_HUB_KERNELS)
    weights = target.state_dict()
    try:
        student.load_state_dict({name: weights[_renumbered(name, kept)] for name in student.state_dict()})
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"layers: cannot be taken from a model of the family {config.model_type} ({error}); give a shape instead"
        ) from None
    student.tie_weights()
    return student


def reduce_head(student: Any, draft_ids: tuple[int, ...], *, learns_embedding: bool) -> None:
    """Leave a model's head the rows of these ids alone. Its embedding, which has all ids, learns only if it has to.

    The embedding is most of a small model with a large vocabulary; that of a target is good as it is.
    """
    embedding, head = student.get_input_embeddings(), student.get_output_embeddings()
    rows = head.weight.detach()
    rows = rows.clone() if len(rows) == len(draft_ids) else rows[list(draft_ids)].clone()
    reduced = torch.nn.Linear(rows.shape[1], rows.shape[0], bias=False)
    reduced.weight = torch.nn.Parameter(rows)
    student.set_output_embeddings(reduced)
    embedding.weight = torch.nn.Parameter(embedding.weight.detach().clone(), requires_grad=learns_embedding)
    config = student.config
    config.tie_word_embeddings = False
    setattr(config, DRAFT_IDS, list(draft_ids))


def share_row(embedding: Any, draft_ids: tuple[int, ...], counts: NDArray[np.float64]) -> None:
    """Give all ids that are not drafted the mean of their rows, by how often they occur."""
    shares = torch.zeros(len(embedding.weight))
    shares[: len(counts)] = torch.from_numpy(counts)
    others = torch.ones(len(shares), dtype=torch.bool)
    others[list(draft_ids)] = False
    shares = torch.where(others, shares + shares.sum() * 1e-9, 0)  # where none of them occurs: the plain mean
    with torch.no_grad():
        embedding.weight[others] = shares @ embedding.weight / shares.sum()


def _renumbered(name: str, kept: tuple[int, ...]) -> str:
    """Return the target's name of a tensor of the student."""
    found = _LAYER.search(name)
    return name if found is None else f"{name[: found.start(1)]}{kept[int(found[1])]}{name[found.end(1) :]}"


def _from_shape(recipe: DrafterRecipe, target: Pretrained | None, vocabulary: Vocabulary) -> Any:
    """Return a Llama model with random weights. Raises ConfigError."""
    assert recipe.width is not None
    kv_heads, head_dim = recipe.kv_heads or recipe.heads, recipe.head_dim or recipe.width // recipe.heads
    if recipe.heads % kv_heads:
        raise ConfigError(f"kv_heads: {kv_heads} must divide the {recipe.heads} heads")
    if head_dim % 2:
        raise ConfigError(f"head_dim: {head_dim} must be even, positions turn pairs; give another head_dim or width")
    end = (target.eos_ids[0] if target.eos_ids else None) if target else vocabulary.separator
    config = LlamaConfig(
        vocab_size=target.vocabulary if target else vocabulary.size,
        hidden_size=recipe.width,
        num_hidden_layers=recipe.depth,
        num_attention_heads=recipe.heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=recipe.ffn or 8 * recipe.width // 3,
        max_position_embeddings=recipe.context or (target.context if target else recipe.window),
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **NO_HUB_KERNELS)
