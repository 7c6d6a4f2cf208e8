"""The model card of a speculator: the target that it was trained for, its training and its acceptance length.

Two files in the speculator's folder hold the card: `outrider.json` for programs, `README.md` for people and the Hugging
Face hub. A speculator drafts for the target whose weights and tokenizer its card names. For another target it would
only be slow, without an error, so Outrider refuses it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from outrider.engine.checkpoints.checkpoint import Weights, read_json
from outrider.errors import CheckpointError, ConfigError
from outrider.hub import CARD, is_gguf

HUMAN = "README.md"
SAME: Final = "outrider_same_as"  # key of config.json: digest of a checkpoint with exactly the same outputs

_DIGITS = 32  # of a digest in hexadecimal


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The content of a speculator's card."""

    kind: str  # "drafter", or the kind of the heads
    target: str  # name of the model that it drafts for
    target_digest: str  # of that model's weights; see `weights_digest`
    tokenizer_digest: str  # in hexadecimal
    objective: str  # the objective that its training minimised
    tokens: int  # tokens that it was trained on
    seconds: float  # duration of its training
    version: int = 0  # of a drafter that learns while it serves; 0: the first training
    acceptance: Mapping[str, float] = field(default_factory=dict)  # temperature -> acceptance length, held-out texts
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the command that trained it


def write_card(folder: Path, card: ModelCard) -> None:
    """Write the card into a speculator's folder. Raises OSError."""
    (folder / CARD).write_text(json.dumps(asdict(card), indent=2, default=str) + "\n", encoding="utf-8")
    (folder / HUMAN).write_text(_page(card), encoding="utf-8")


def read_card(folder: Path) -> ModelCard | None:
    """Return the card of a folder, or None where there is none. Raises CheckpointError for a damaged card."""
    path = folder / CARD
    if not path.exists():
        return None
    raw = read_json(path)
    wanted = {item.name for item in fields(ModelCard)}
    try:
        return ModelCard(**{name: value for name, value in raw.items() if name in wanted})
    except TypeError as error:
        missing = str(error).rpartition(": ")[2]
        raise CheckpointError(f"{path}: is no speculator's card, it lacks {missing}; train it anew") from None


def weights_digest(folder: Path) -> str:
    """Return a digest of a checkpoint's tensors: their names, types, shapes, and first, middle and last rows.

    It does not depend on how the tensors are spread over files. Training changes every row, so another model has
    another digest; that of a hundred gigabytes takes a second. A padded checkpoint has the digest of its source.

    Raises CheckpointError.
    """
    if not is_gguf(folder) and isinstance(same := read_json(folder / "config.json").get(SAME), str):
        return same
    digest, weights = hashlib.sha256(), Weights(folder)
    for name in sorted(weights.files):
        dtype, shape, rows = weights.row_bytes(name)
        digest.update(f"{name} {dtype} {[*shape]}\n".encode())
        for row in rows:
            digest.update(row)
    return digest.hexdigest()[:_DIGITS]


def check_card(speculator: Path, targets: Sequence[Path]) -> None:
    """Raise ConfigError when a speculator has a card that names none of these targets."""
    card = read_card(speculator)
    if card is not None and card.target_digest not in map(weights_digest, targets):
        raise ConfigError(
            f"{speculator}: was trained for {card.target}, whose weights are others than those of "
            f"{', '.join(map(str, targets))}; train one for this target, or set any_target if it is to draft for it "
            "nevertheless"
        )


def _page(card: ModelCard) -> str:
    """Return the README of a speculator, with the metadata of the Hugging Face hub."""
    rows = {
        "drafts for": f"{card.target}, weights `{card.target_digest}`, tokenizer `{card.tokenizer_digest}`",
        "kind": card.kind,
        "objective": card.objective,
        "trained on": f"{card.tokens:,} tokens, in {card.seconds:,.0f} s",
        "version": str(card.version),
        **{f"acceptance length at temperature {at}": f"{length:.2f}" for at, length in card.acceptance.items()},
        **{f"`{key}`": f"`{value}`" for key, value in card.settings.items()},
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return f"""---
base_model: {json.dumps(card.target)}
library_name: outrider
tags: [speculative-decoding, {card.kind}]
---

# A speculator for {card.target}

Predicts the next tokens of {card.target}, so that Outrider can verify several tokens in one pass of that model. The
text stays the model's own.

| | |
|---|---|
{table}
"""
