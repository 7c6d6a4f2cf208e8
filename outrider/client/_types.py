"""What the SDK gives back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from outrider.core.contract import SHARED_NOISE
from outrider.core.speculation import UNKNOWN, SpeculationStatus


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # the model's end of text, or a stop string
    LENGTH = "length"  # max_tokens
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ABANDONED = "abandoned"  # it was broken off, and nobody resumed it in time
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the raw model's, at temperature 1 and before any filter."""

    logprob: float  # of the token that was said
    top: tuple[tuple[int, float], ...]  # the most likely token ids and theirs, most likely first
    text: bytes = b""  # of the token, in UTF-8; it may be a part of a character
    top_texts: tuple[bytes, ...] = ()  # of the most likely ones


@dataclass(frozen=True, slots=True)
class Chunk:
    """New durable tokens and the text that they complete."""

    text: str  # never splits a character; may be empty
    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]  # for each token, its lead in log-probability plus noise over the next best; NaN: not known
    next_position: int  # position after the last token, counted from the first token of the prompt
    text_offset: int  # characters of the answer so far, this chunk included
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token, if they were asked for


@dataclass(frozen=True, slots=True)
class Usage:
    """What a generation cost, and what speculation brought."""

    prompt_tokens: int
    completion_tokens: int
    steps: int  # verifier steps that committed the answer
    verified: int  # drafted nodes that were verified
    accepted: int  # of these, committed
    reached_by_depth: tuple[int, ...]  # steps whose accepted path reached depth d, at index d - 1
    tried_by_depth: tuple[int, ...]  # steps that verified a node at depth d, at index d - 1
    wire_bytes: int  # on drafters' streams, both directions
    first_token_s: float  # from the request's arrival at the router to the first token
    total_s: float  # from the request's arrival at the router to the end
    decode_s: float  # from the first token to the last
    speculation: SpeculationStatus = UNKNOWN  # whether drafts were verified, and if not, why

    @property
    def acceptance_length(self) -> float:
        """Committed tokens per verifier step; 1 without speculation, 0 when there was no step."""
        return self.completion_tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_by_depth(self) -> tuple[float, ...]:
        """For depth d, at index d - 1: steps whose path reached d / steps that verified a node at d."""
        return tuple(
            reached / tried for reached, tried in zip(self.reached_by_depth, self.tried_by_depth, strict=False) if tried
        )

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: the tokens after the first one, over the time from the first to the last."""
        return (self.completion_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished generation. The same seed, prompt and parameters give the same text again under the rule
    "shared-noise"; under the others the text also depends on what was drafted."""

    text: str
    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]  # as in Chunk
    finish_reason: FinishReason
    seed: int
    model: str
    session_id: str
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token, if they were asked for
    generation: int = 1  # of the session, from 1
    cached_tokens: int = 0  # of the prompt, whose KV was there already
    forked_from: str = ""  # the session that this one forked from
    resumes: int = 0  # times that the call broke off and went on
    rule: str = SHARED_NOISE  # by which drafted tokens were accepted
    lossy: bool = False  # whether that rule lets the text be other than the model's own: asked for by name only


@dataclass(frozen=True, slots=True)
class Session:
    """What is known of a session."""

    session_id: str
    model: str
    length: int  # durable tokens, prompts and answers
    digest: int  # over them
    generation: int  # the latest, from 1; 0: there was none
    running: bool  # whether that one has not ended
    finish_reason: FinishReason | None  # why it ended
    answer_position: int  # of its first token
    epoch: int  # raised whenever the session changed hands
    verifier: str  # worker id, where its KV is
    drafters: tuple[str, ...]  # worker ids


@dataclass(frozen=True, slots=True)
class StepNode:
    """A node of a token tree that a step verified."""

    token: int
    text: bytes  # of this token alone; may end inside a character
    parent: int  # index among the step's nodes; -1 is the root
    chance: float  # that its parent's target token is this one, by its drafter's judgement
    accepted: bool
    drafter: str  # one that had sent it; empty: the verifier's own


@dataclass(frozen=True, slots=True)
class StepTree:
    """What one step verified for a session, and what it committed."""

    position: int  # of the first committed token
    committed: tuple[int, ...]
    texts: tuple[bytes, ...]  # of these
    nodes: tuple[StepNode, ...]  # parents before children
    left_out: int  # nodes of the tree that the step did not take
    forward_s: float
    waited_s: float
    depth: int  # ceilings of the plan in force: gamma
    width: int
    missed: int  # steps before this one that are not shown, because they came too fast


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can be asked for right now."""

    name: str
    context: int  # prompt and answer together may not be longer, in tokens
    vocabulary: int
    tokenizer_digest: bytes
    verifiers: int
    drafters: int
    misfits: tuple[str, ...] = ()  # drafters that cannot draft for it, each with the reason
