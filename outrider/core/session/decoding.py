"""What routers and verifiers tell one another of a generation: its start, its commits, its end."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.control.drafters.contributions import DrafterContribution
from outrider.core.session.contract import Contract, Plan, StepReport

SCORED_AHEAD = 1024  # positions of a prompt whose log-probabilities are sent beyond the acknowledged one


@dataclass(frozen=True, slots=True)
class DecodeStart:
    """What a verifier needs to begin."""

    session_id: str
    tenant: str
    epoch: int
    model: str
    tokenizer_digest: bytes
    tokens: tuple[int, ...]  # all tokens of the session so far
    digest: int  # over the tokens
    answer_position: int
    contract: Contract
    plan: Plan
    window: int
    lease_s: float
    timeout_s: float | None  # until the deadline; None: no deadline
    scored: int = 0  # first position whose log-probabilities are still wanted, where the contract wants the prompt's


@dataclass(frozen=True, slots=True)
class ReceivedCommit:
    """The target's next tokens, as one step committed them."""

    epoch: int
    position: int  # position of the first token
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]  # one for each token
    logprobs: bytes  # as in outrider.core.sampling.logprobs; empty unless the contract asks for them
    digest: int  # over the session with these tokens
    report: StepReport
    contributions: tuple[DrafterContribution, ...] = ()  # one for each drafter, where there are several


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of some tokens of a prompt that follow one another."""

    position: int  # of the first of them
    logprobs: bytes  # as in outrider.core.sampling.logprobs
    ranks: tuple[int, ...]  # one for each token; 1: the likeliest one
