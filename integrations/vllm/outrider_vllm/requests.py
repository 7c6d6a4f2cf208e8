"""How a request of vLLM draws its tokens, as drafters and the shared noise have to know it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.core.session.contract import FILLING, Contract
from outrider.errors import InvalidRequest

if TYPE_CHECKING:
    from vllm import SamplingParams

NOISE, DRAFTS = "outrider_shared_noise", "outrider_drafts"  # what a request may say in `vllm_xargs`
LARGEST_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """What holds for one request."""

    contract: Contract  # how drafters rank their drafts
    noise_seed: int | None  # seed of the shared noise; None: vLLM draws by itself, or takes the likeliest token
    drafted: bool  # whether it is drafted for
    accepts_at_random: bool  # vLLM draws by itself


def terms_of(request: str, params: SamplingParams, *, shared_noise: bool, instance: str) -> RequestTerms:
    """Return the terms of a request by its parameters. `shared_noise`: for requests that do not say.

    `instance`: what all ranks of this vLLM share and no other one does, for requests without a seed.
    """
    said = params.extra_args or {}
    random = params.temperature > 0
    noised = random and bool(said.get(NOISE, shared_noise))
    if params.seed is not None:
        seed = params.seed & LARGEST_SEED
    else:
        seed = int.from_bytes(hashlib.sha256(f"{instance}\0{request}".encode()).digest()[:8])
    return RequestTerms(
        contract_of(params, seed, noised=noised),
        seed if noised else None,
        drafted=bool(said.get(DRAFTS, True)),
        accepts_at_random=random and not noised,
    )


def contract_of(params: SamplingParams, seed: int, *, noised: bool) -> Contract:
    """Return the contract that drafters get. Where vLLM draws by itself, its likeliest tokens are the best drafts.

    A contract is narrower than what vLLM takes: where it refuses a value, drafts follow seed and temperature alone.
    """
    drawn: dict[str, Any] = {"seed": seed, "max_tokens": FILLING, "temperature": params.temperature if noised else 0.0}
    changed = {
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logit_bias": tuple((params.logit_bias or {}).items()),
        "allowed_ids": tuple(params.allowed_token_ids or ()),
        "top_k": max(0, params.top_k),
        "top_p": params.top_p,
        "min_p": params.min_p,
    }
    try:
        return Contract(**drawn, **changed)
    except InvalidRequest:
        return Contract(**drawn | {"temperature": min(100.0, drawn["temperature"])})
