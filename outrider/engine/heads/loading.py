"""Loads heads from a folder and makes the speculator that drafts with them; refuses heads of another target."""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.engine.checkpoints.checkpoint import ModelConfig, read_config, read_tokenizer_digests, read_tokenizer_size
from outrider.engine.checkpoints.model_card import read_card, weights_digest
from outrider.engine.heads.checkpoint_io import CPU, load_network, pack_linears
from outrider.engine.heads.config import HeadsConfig, read_heads_config
from outrider.engine.heads.eagle_drafts import EagleDrafts
from outrider.engine.heads.embeddings import read_target_embeddings
from outrider.engine.heads.last_row import MedusaDrafts, MlpDrafts
from outrider.engine.heads.medusa import Medusa
from outrider.engine.heads.mlp import MlpSpeculator
from outrider.engine.heads.speculator import Speculator
from outrider.engine.loading import chosen_backend
from outrider.engine.torch_layers.linear import can_prepack
from outrider.errors import ConfigError

MOST_PADDING = 4096  # maximum difference of ids between models with the same tokenizer


def check_heads(folder: Path, target: Path) -> HeadsConfig:
    """Return the config of a folder's heads.

    Raises CheckpointError, and ConfigError where the heads were made for another target than this checkpoint.
    """
    check_family(target)
    shape, config = read_heads_config(folder), read_config(target)
    if shape.width != config.width:
        raise _foreign(folder, f"a target whose width is {shape.width}, and that of {target} is {config.width}")
    if not _may_share_tokenizer(shape, config, target):
        ours, theirs = shape.vocabulary, config.vocabulary
        raise _foreign(folder, f"a target whose vocabulary is {ours}, and that of {target} is {theirs}")
    shape.features.check(config.layers)
    card = read_card(folder)
    if card is not None and card.target_digest != weights_digest(target):
        raise _foreign(folder, f"{card.target}, whose weights are others than those of {target}")
    if card is not None and card.tokenizer_digest not in (it.hex() for it in read_tokenizer_digests(target)):
        raise _foreign(folder, f"{card.target}, whose tokenizer is another than that of {target}")
    return shape


def check_family(target: Path) -> None:
    """Raise ConfigError for a target that cannot have heads."""
    if chosen_backend(target, "auto") != "native":
        raise ConfigError(
            f"heads: the family of {target} runs through transformers, which does not give the hidden states that they "
            "draft from; leave heads out"
        )


def load_speculator(folder: Path, target: Path, *, precise: bool, slots: int, context: int) -> Speculator:
    """Return a speculator with a folder's heads, for an engine of `slots` slots over `target`.

    The linears of the heads are read in bfloat16 where this machine supports it, unless `precise`. Raises as
    `check_heads`.
    """
    check_heads(folder, target)
    dtype = heads_dtype(precise=precise)
    shape, network = load_network(folder)
    pack_linears(network, dtype)
    embeddings = read_target_embeddings(target, dtype)
    if shape.own_head:
        embeddings = embeddings.below(shape.vocabulary)
    if isinstance(network, Medusa):
        return MedusaDrafts(network, embeddings)
    if isinstance(network, MlpSpeculator):
        return MlpDrafts(network, embeddings)
    return EagleDrafts(network, shape, embeddings, slots=slots, context=context)


def heads_dtype(*, precise: bool, device: torch.device = CPU) -> torch.dtype:
    """Return the type in which the linears of heads are read."""
    possible = device.type != "cpu" or can_prepack(torch.bfloat16)
    return torch.float32 if precise or not possible else torch.bfloat16


def _may_share_tokenizer(shape: HeadsConfig, config: ModelConfig, target: Path) -> bool:
    """Return whether heads and target have equally many ids, or both have all of the tokenizer's and other padding."""
    if shape.vocabulary == config.vocabulary:
        return True
    if abs(shape.vocabulary - config.vocabulary) > MOST_PADDING:
        return False
    return shape.vocabulary >= read_tokenizer_size(target)


def _foreign(folder: Path, target: str) -> ConfigError:
    """Return the error for heads that were made for another target."""
    return ConfigError(f"heads: {folder} was made for {target}; take heads that were trained for this target")
