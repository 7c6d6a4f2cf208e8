"""The card of a speculator: what it was trained for, and what came of it. Two files in its folder say the same.

`outrider.json` is for programs, `README.md` for people and for the Hugging Face hub. A speculator drafts for the target
whose weights and tokenizer its card names; for another it would only be slow, which nobody notices, so it is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from outrider.engine.checkpoint import Weights, read_json
from outrider.errors import CheckpointError, ConfigError
from outrider.hub import CARD

HUMAN = "README.md"
SAME: Final = "outrider_same_as"  # a key of config.json: the digest of a checkpoint that says exactly the same

_DIGITS = 32  # of a digest in hexadecimal


@dataclass(frozen=True, slots=True)
class Card:
    """What a speculator is."""

    kind: str  # "drafter" or the kind of the heads
    target: str  # name of the model that it drafts for
    target_digest: str  # of that model's weights, as `weights_digest` gives it
    tokenizer_digest: str  # in hexadecimal
    objective: str  # what its training minimised
    tokens: int  # that it was trained on
    seconds: float  # that it took
    version: int = 0  # of a drafter that learns while it serves; 0: as it was first trained
    acceptance: Mapping[str, float] = field(default_factory=dict)  # temperature -> acceptance length, held-out texts
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the command that made it


def write_card(folder: Path, card: Card) -> None:
    """Puts the card into a speculator's folder. Raises OSError."""
    (folder / CARD).write_text(json.dumps(asdict(card), indent=2, default=str) + "\n", encoding="utf-8")
    (folder / HUMAN).write_text(_page(card), encoding="utf-8")


def read_card(folder: Path) -> Card | None:
    """The card of a folder; None where there is none. Raises CheckpointError for one that is damaged."""
    path = folder / CARD
    if not path.exists():
        return None
    raw = read_json(path)
    wanted = {item.name for item in fields(Card)}
    try:
        return Card(**{name: value for name, value in raw.items() if name in wanted})
    except TypeError as error:
        missing = str(error).rpartition(": ")[2]
        raise CheckpointError(f"{path}: is no speculator's card, it lacks {missing}; train it anew") from None


def weights_digest(folder: Path) -> str:
    """Names a checkpoint by what its tensors are: names, types, shapes, and the first, middle and last row of each.

    However the tensors are spread over files. A training changes every row, so another model has another digest, and
    that of a hundred gigabytes takes a second. A padded checkpoint has the digest of what it was made of.

    Raises CheckpointError.
    """
    same = read_json(folder / "config.json").get(SAME)
    if isinstance(same, str):
        return same
    digest, weights = hashlib.sha256(), Weights(folder)
    for name in sorted(weights.files):
        dtype, shape, rows = weights.row_bytes(name)
        digest.update(f"{name} {dtype} {[*shape]}\n".encode())
        for row in rows:
            digest.update(row)
    return digest.hexdigest()[:_DIGITS]


def check_card(speculator: Path, targets: Sequence[Path]) -> None:
    """Raises ConfigError when the speculator of a folder has a card, and none of these targets is the one it names."""
    card = read_card(speculator)
    if card is not None and card.target_digest not in map(weights_digest, targets):
        raise ConfigError(
            f"{speculator}: was trained for {card.target}, whose weights are others than those of "
            f"{', '.join(map(str, targets))}; train one for this target, or say any_target if it is to draft for it "
            "nevertheless"
        )


def _page(card: Card) -> str:
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

Guesses what {card.target} says next, so that Outrider can verify several tokens in one pass of that model. The text
stays the model's own.

| | |
|---|---|
{table}
"""
