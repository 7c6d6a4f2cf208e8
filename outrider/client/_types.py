"""The SDK's result types."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

from outrider.client._terms import parsed
from outrider.core.answers.answer_reader import ANY_TERMS, PLAIN_FORM, AnswerReader, AnswerTerms, ModelForm
from outrider.core.answers.call_reader import CONTENT, REASONING
from outrider.core.session.contract import SHARED_NOISE, FinishReason
from outrider.core.session.speculation_status import UNKNOWN, SpeculationStatus
from outrider.wire import inference as wire


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the raw model's, at temperature 1 and before any filter."""

    logprob: float  # of the committed token
    top: tuple[tuple[int, float], ...]  # the likeliest token ids with their log-probabilities, likeliest first
    text: bytes = b""  # of the token, in UTF-8; it may be a part of a character
    top_texts: tuple[bytes, ...] = ()  # of the likeliest tokens
    id: int = 0  # the token's id
    rank: int = 0  # of the prompt's tokens: 1 is the likeliest; 0: the first, whose `logprob` is NaN: it follows none


class LogprobRows(Sequence[TokenLogprobs]):
    """The log-probabilities of several tokens. Each is decoded when it is read: as the router sends them they take a
    fortieth of the memory of Python's objects."""

    __slots__ = ("rows",)

    def __init__(self, rows: Iterable[bytes] = ()) -> None:
        """`rows`: a serialized TokenLogprobs of the wire for each token."""
        self.rows = tuple(rows)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> LogprobRows: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | LogprobRows:
        return LogprobRows(self.rows[index]) if isinstance(index, slice) else _decoded(self.rows[index])

    def __eq__(self, other: object) -> bool:
        """Return whether all rows are the same; `other` may be any sequence of them."""
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"LogprobRows({[*self]})"


NO_ROWS = LogprobRows()


@dataclass(frozen=True, slots=True)
class Chunk:
    """New durable tokens, and the new text."""

    text: str  # never splits a character; may be empty
    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]  # of each token: its lead in log-probability plus noise over the next best; NaN: unknown
    next_position: int  # position after the last token, counted from the first token of the prompt
    text_offset: int  # characters of the answer so far, this chunk included
    logprobs: LogprobRows = NO_ROWS  # one for each token, if the request has `logprobs`
    prompt_logprobs: LogprobRows = NO_ROWS  # of the prompt's next tokens, in chunks before the answer


@dataclass(frozen=True, slots=True)
class Usage:
    """The cost of a generation, and the effect of speculation."""

    prompt_tokens: int
    completion_tokens: int
    steps: int  # verifier steps that committed the answer
    verified: int  # drafted nodes that were verified
    accepted: int  # verified nodes that were committed
    reached_by_depth: tuple[int, ...]  # steps whose accepted path reached depth d, at index d - 1
    tried_by_depth: tuple[int, ...]  # steps that verified a node at depth d, at index d - 1
    wire_bytes: int  # on drafters' streams, both directions
    first_token_s: float  # from the request's arrival at the router to the first token
    total_s: float  # from the request's arrival at the router to the end
    decode_s: float  # from the first token to the last
    speculation: SpeculationStatus = UNKNOWN  # whether drafts were verified, and if not, why
    reasoning_tokens: int = 0  # of the answer, up to the end mark of reasoning; 0 without reasoning

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
    """A finished generation.

    Under the rule "shared-noise" the same seed, prompt and parameters give the same text again; under the other rules
    the text also depends on the drafts.
    """

    text: str
    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]  # as in Chunk
    finish_reason: FinishReason
    seed: int
    model: str
    session_id: str
    usage: Usage
    logprobs: LogprobRows = NO_ROWS  # one for each token, if the request has `logprobs`
    prompt_logprobs: LogprobRows = NO_ROWS  # one for each token before the answer, if the request has `prompt_logprobs`
    generation: int = 1  # number in the session, from 1
    cached_tokens: int = 0  # tokens of the prompt whose KV was cached
    forked_from: str = ""  # the session that this session forked from
    resumes: int = 0  # times that the call broke off and continued
    rule: str = SHARED_NOISE  # acceptance rule of drafted tokens
    lossy: bool = False  # the rule changes the distribution of the text; such a rule is used only on request
    schema: Any = field(default=None, repr=False, compare=False)  # the request's schema
    terms: AnswerTerms = field(default=ANY_TERMS, repr=False)  # what the request's answer may have in it
    form: ModelForm = field(default=PLAIN_FORM, repr=False)  # how the model writes that
    stop: str = ""  # the string of the request's `stop` that ended it; empty: none did
    prompt_token_ids: tuple[int, ...] = ()  # all before the answer, if the request has `return_prompt_token_ids`

    @property
    def parsed(self) -> Any:
        """The answer as an object of the request's `schema`: of its pydantic model, or what its JSON stands for.

        Raises ValueError if the answer was cut, as by max_tokens, or calls tools instead, or the request had no schema.
        """
        if self.schema is None:
            raise ValueError("the request had no schema; give schema=")
        if self.finish_reason is not FinishReason.STOP:
            raise ValueError(f"the answer was cut ({self.finish_reason}), and is no whole JSON; raise max_tokens")
        parts = self.parts
        if parts.tool_calls:
            raise ValueError("the answer calls tools, and has no JSON of the schema; see tool_calls")
        return parsed(self.schema, parts.content)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of the request's tools in the answer. One that was cut, or is no JSON, is content."""
        return self.parts.tool_calls

    @property
    def content(self) -> str:
        """The answer without those calls, and without reasoning."""
        return self.parts.content

    @property
    def reasoning(self) -> str:
        """What the model wrote before its answer, between marks that it has for that."""
        return self.parts.reasoning

    @property
    def parts(self) -> AnswerParts:
        """All three. The text is read for it each time."""
        reader = AnswerReader(self.form, self.terms)
        pieces = [*reader.read(self.text), *reader.finish()]
        failed = {piece.call for piece in pieces if piece.failed}
        texts: defaultdict[int, list[str]] = defaultdict(list)
        for piece in pieces:
            texts[CONTENT if piece.failed else piece.call].append(piece.text)
        calls = tuple(
            ToolCall(piece.name, "".join(texts[piece.call]), piece.id)
            for piece in pieces
            if piece.name and piece.call not in failed
        )
        return AnswerParts("".join(texts[CONTENT]), "".join(texts[REASONING]), calls)


class AnswerParts(NamedTuple):
    """An answer, divided."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool in an answer."""

    name: str
    arguments: str  # a JSON object
    id: str = ""  # if the model gave one


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """The tokens of a prompt."""

    count: int  # tokens
    ids: tuple[int, ...]  # empty if the number alone was wanted
    names: tuple[str, ...]  # of the tokens in the tokenizer's vocabulary, if they were wanted
    context: int  # limit on prompt and answer together, in tokens; 0: no verifier serves the model now


@dataclass(frozen=True, slots=True)
class Session:
    """The state of a session."""

    session_id: str
    model: str
    length: int  # durable tokens, prompts and answers
    digest: int  # over the durable tokens
    generation: int  # number of the latest generation, from 1; 0: there was none
    running: bool  # the latest generation has not ended
    finish_reason: FinishReason | None  # why the latest generation ended
    answer_position: int  # of the first token of the latest answer
    epoch: int  # number of times that the session changed its owner
    verifier: str  # id of the worker that holds the session's KV
    drafters: tuple[str, ...]  # worker ids


@dataclass(frozen=True, slots=True)
class StepNode:
    """A node of a token tree that a step verified."""

    token: int
    text: bytes  # of this token alone; may end inside a character
    parent: int  # index among the step's nodes; -1 is the root
    chance: float  # the drafter's probability that this is the target's token after the parent
    accepted: bool
    drafter: str  # a drafter that sent the node; empty: a proposer of the verifier


@dataclass(frozen=True, slots=True)
class StepTree:
    """The nodes that one step verified for a session, and the tokens that it committed."""

    position: int  # of the first committed token
    committed: tuple[int, ...]
    texts: tuple[bytes, ...]  # of the committed tokens
    nodes: tuple[StepNode, ...]  # parents before children
    left_out: int  # nodes of the tree that the step did not take
    hidden: int  # verified nodes that are not shown: not accepted, and drafted from what may hold others' texts
    forward_s: float
    waited_s: float
    depth: int  # ceilings of the plan in force: gamma
    width: int
    missed: int  # earlier steps that were dropped, because they came too fast


@dataclass(frozen=True, slots=True)
class ModelAdapter:
    """A low-rank adapter (LoRA), which requests name as their model: NAME or MODEL:NAME."""

    name: str
    model: str
    folder: str  # below the verifiers' folder of adapters
    digest: bytes  # of its files
    rank: int  # the largest one
    parameters: int


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is served now."""

    name: str
    context: int  # limit on prompt and answer together, in tokens
    vocabulary: int
    tokenizer_digest: bytes
    verifiers: int
    drafters: int
    misfits: tuple[str, ...] = ()  # workers that are of no use to it, each with the reason
    adapters: tuple[ModelAdapter, ...] = ()  # the adapters that requests may name, by name


def _decoded(row: bytes) -> TokenLogprobs:
    entry = wire.TokenLogprobs.FromString(row)
    top = tuple(zip(entry.top_ids, entry.top_logprobs, strict=True))
    return TokenLogprobs(entry.logprob, top, entry.text, tuple(entry.top_texts), entry.id, entry.rank)
