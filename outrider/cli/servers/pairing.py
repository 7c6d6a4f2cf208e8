"""Checks whether a checkpoint can draft for a target, from the files of the two folders; no model is loaded."""

from __future__ import annotations

from pathlib import Path

from outrider.core.session.speculation_status import ADVICE, SpeculationReason

Rows = list[tuple[str, str]]  # (property, value)


def pairing(drafter: Path, target: Path) -> tuple[Rows, str]:
    """Return the properties that decide whether `drafter` can draft for `target`, and the line for scripts.

    Raises CheckpointError for a folder that is not a checkpoint.
    """
    from outrider.engine.checkpoints.checkpoint import read_tokenizer_digest, tokenizer_difference
    from outrider.engine.checkpoints.model_card import read_card, weights_digest

    digests = read_tokenizer_digest(drafter), read_tokenizer_digest(target)
    card = read_card(drafter)
    rows = [("drafter", str(drafter)), ("target", str(target)), ("trained for", card.target if card else "any target")]
    reason = SpeculationReason.DRAFTING
    if digests[0] != digests[1]:
        reason = SpeculationReason.OTHER_TOKENIZER
        which = tokenizer_difference(drafter, target) or "texts become other tokens"
        rows.append(("tokenizers", f"{digests[0].hex()[:8]} and {digests[1].hex()[:8]}: {which}"))
    else:
        rows.append(("tokenizers", "the same"))
    if card is not None and card.target_digest != weights_digest(target):
        reason = SpeculationReason.OTHER_TARGET
    fits = reason is SpeculationReason.DRAFTING
    rows.append(("drafts for it", "yes" if fits else f"no: {ADVICE[reason].what}; {ADVICE[reason].remedy}"))
    return rows, f"describe: drafts_for_it={'yes' if fits else 'no'} reason={'' if fits else reason}"
