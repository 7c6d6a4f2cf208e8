"""From a folder of heads to what drafts with them; heads of another target are refused."""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.engine.card import read_card, weights_digest
from outrider.engine.checkpoint import ModelConfig, read_config, read_tokenizer_digest, read_tokenizer_size
from outrider.engine.heads.eagle_drafts import EagleDrafts
from outrider.engine.heads.ends import read_ends
from outrider.engine.heads.folder import load_network, pack_linears
from outrider.engine.heads.latest import MedusaDrafts, MlpDrafts
from outrider.engine.heads.medusa import Medusa
from outrider.engine.heads.mlp import MlpSpeculator
from outrider.engine.heads.shape import Shape, read_shape
from outrider.engine.heads.speculator import Speculator
from outrider.engine.linear import can_prepack
from outrider.engine.loading import chosen_backend
from outrider.errors import ConfigError

MOST_PADDING = 4096  # ids by which models with one tokenizer differ at the most


def check_heads(folder: Path, target: Path) -> Shape:
    """What the heads of a folder are. Raises CheckpointError, and ConfigError where they were made for another target
    than this checkpoint."""
    check_family(target)
    shape, config = read_shape(folder), read_config(target)
    if shape.width != config.width:
        raise _foreign(folder, f"a target whose width is {shape.width}, and that of {target} is {config.width}")
    if not _may_share_tokenizer(shape, config, target):
        ours, theirs = shape.vocabulary, config.vocabulary
        raise _foreign(folder, f"a target whose vocabulary is {ours}, and that of {target} is {theirs}")
    shape.features.check(config.layers)
    card = read_card(folder)
    if card is not None and card.target_digest != weights_digest(target):
        raise _foreign(folder, f"{card.target}, whose weights are others than those of {target}")
    if card is not None and card.tokenizer_digest != read_tokenizer_digest(target).hex():
        raise _foreign(folder, f"{card.target}, whose tokenizer is another than that of {target}")
    return shape


def check_family(target: Path) -> None:
    """Raises ConfigError for a target that cannot have heads."""
    if chosen_backend(target, "auto") != "native":
        raise ConfigError(
            f"heads: the family of {target} runs through transformers, which does not give the hidden states that they "
            "draft from; leave heads out"
        )


def load_speculator(folder: Path, target: Path, *, precise: bool, slots: int, context: int) -> Speculator:
    """Drafts with a folder's heads for an engine of so many slots over `target`. Their linears are read in bfloat16,
    where this machine has that, unless `precise`. Raises as `check_heads`."""
    check_heads(folder, target)
    dtype = heads_dtype(precise=precise)
    shape, network = load_network(folder)
    pack_linears(network, dtype)
    ends = read_ends(target, dtype)
    if shape.own_head:
        ends = ends.below(shape.vocabulary)
    if isinstance(network, Medusa):
        return MedusaDrafts(network, ends)
    if isinstance(network, MlpSpeculator):
        return MlpDrafts(network, ends)
    return EagleDrafts(network, shape, ends, slots=slots, context=context)


def heads_dtype(*, precise: bool) -> torch.dtype:
    """That linears of heads are read in."""
    return torch.float32 if precise or not can_prepack(torch.bfloat16) else torch.bfloat16


def _may_share_tokenizer(shape: Shape, config: ModelConfig, target: Path) -> bool:
    """Whether heads and target have as many ids, or both all of the tokenizer's, padded differently."""
    if shape.vocabulary == config.vocabulary:
        return True
    if abs(shape.vocabulary - config.vocabulary) > MOST_PADDING:
        return False
    return shape.vocabulary >= read_tokenizer_size(target)


def _foreign(folder: Path, target: str) -> ConfigError:
    return ConfigError(f"heads: {folder} was made for {target}; take heads that were trained for this target")
