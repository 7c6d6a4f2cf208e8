"""Whether a drafter can draft for a verifier, from what the two announce."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.session.speculation_status import SpeculationReason, SpeculationStatus, nearest, status_of
from outrider.store.registry import Worker


def incompatibility(drafter: Worker, verifier: Worker, *, sampled: bool = False) -> SpeculationStatus | None:
    """Return why a drafter cannot draft for a verifier; None: it can. `sampled`: under a rule that draws from q."""
    name = f"drafter {drafter.address} is {drafter.model}"
    if verifier.treeless:
        return status_of(SpeculationReason.TREELESS, f"{verifier.model}: {verifier.treeless_why}")
    if drafter.tokenizer_digest != verifier.tokenizer_digest:
        digests = drafter.tokenizer_digest.hex()[:8], verifier.tokenizer_digest.hex()[:8]
        explanation = (
            f"{name}, whose tokenizer is {digests[0]}; that of {verifier.model} at {verifier.address} is {digests[1]}"
        )
        return status_of(SpeculationReason.OTHER_TOKENIZER, explanation)
    if drafter.trained_for and verifier.weights and drafter.trained_for != verifier.weights:
        explanation = f"{name}, trained for another model than {verifier.model} at {verifier.address}"
        return status_of(SpeculationReason.OTHER_TARGET, explanation)
    if sampled and not drafter.draws:
        return status_of(SpeculationReason.RULE, name)
    if sampled and not verifier.lets_draw(drafter.worker_id):
        explanation = f"{drafter.worker_id} is not among the trusted_drafters of {verifier.model} at {verifier.address}"
        return status_of(SpeculationReason.RULE, explanation)
    return None


def incompatible_drafters(
    workers: Sequence[Worker], verifiers: Sequence[Worker]
) -> list[tuple[Worker, SpeculationStatus]]:
    """Return the drafters among `workers` that can draft for none of these verifiers, each with the reason."""
    found = []
    for drafter in workers:
        if drafter.role != "drafter" or not verifiers:
            continue
        reasons = [incompatibility(drafter, verifier) for verifier in verifiers]
        if None not in reasons:
            found.append((drafter, nearest(reason for reason in reasons if reason is not None)))
    return found
