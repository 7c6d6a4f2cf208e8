"""The contract of a generation, the ceilings on its speculation, and the report of one verifier step."""

from __future__ import annotations

import re
import reprlib
from copy import deepcopy
from dataclasses import dataclass, fields
from enum import IntEnum, StrEnum
from typing import Final, Literal, NamedTuple, TypeVar, get_args

from outrider.core.answers.reasoning import Reasoning
from outrider.errors import InvalidRequest

LEAST_TEMPERATURE = 1e-5  # below it the likeliest token is chosen: in the limit it is, and logits over it overflow
SHARED_NOISE: Final = "shared-noise"
RuleName = Literal[  # acceptance rules; see outrider.core.acceptance
    "shared-noise",
    "target-match",
    "speculative-sampling",
    "recursive-rejection",
    "block-verification",
    "traversal-verification",
    "lenient-speculative-sampling",
    "typical-acceptance",
]
GrammarKind = Literal["json_schema", "regex", "choices", "lark"]
Priority = Literal["interactive", "batch"]  # batch requests wait where all KV slots are in use
PolicyName = Literal[
    "goodput", "ema", "heuristic", "fixed", "rounds", "off"
]  # see outrider.core.control.depth.policies
RULES: tuple[str, ...] = get_args(RuleName)
LENIENT = "lenient-speculative-sampling"
LOSSY = (LENIENT, "typical-acceptance")  # the text's distribution differs from the target's own
FILLING = 2**32 - 1  # value of `max_tokens` with which the answer may fill the context; no context is that long
DEFAULT_MAX_TOKENS = 128
MAX_STOP_IDS = 64
MAX_LISTED = 4096  # entries of each list of allowed, banned or biased ids
MAX_BIAS = 100.0
MAX_LOGPROBS = 20
MAX_GRAMMAR = 2**17  # characters
MAX_FOLDER = 200  # characters of an adapter's folder
ADAPTER_DIGEST = re.compile("[0-9a-f]{32}")

# Filters and temperatures beyond these leave a text that shows little of others: a single token is left to choose,
# or the shared noise alone chooses, whatever the models predict. See `Contract.representative`.
MIN_USUAL_TOP_K = 10
MIN_USUAL_TOP_P = 0.5
MAX_USUAL_MIN_P = 0.3
MAX_USUAL_TEMPERATURE = 1.5

EstimatesT = TypeVar("EstimatesT")


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # the model's end of text, or a stop string
    LENGTH = "length"  # max_tokens
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ABANDONED = "abandoned"  # the call broke off, and no client resumed it in time
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of an answer has to be, as a whole. Raises InvalidRequest for an unknown kind or a long text."""

    kind: str  # one of `GrammarKind`
    text: str  # the JSON schema, the expression, a JSON list of strings, or the grammar in Lark's form
    reasoning: str = ""  # what may come before that text, one of `Reasoning`

    def __post_init__(self) -> None:
        kinds = get_args(GrammarKind)
        if self.kind not in kinds:
            raise InvalidRequest("grammar.kind", f"is {reprlib.repr(self.kind)}, must be one of {', '.join(kinds)}")
        if self.reasoning not in get_args(Reasoning):
            raise InvalidRequest("grammar.reasoning", f"is {reprlib.repr(self.reasoning)}, must be marked or opened")
        if len(self.text) > MAX_GRAMMAR:
            raise InvalidRequest("grammar.text", f"has {len(self.text)} characters, must have at most {MAX_GRAMMAR}")


@dataclass(frozen=True, slots=True)
class Adapter:
    """A low-rank adapter of the model, in the version that its digest names. Raises InvalidRequest for other values."""

    folder: str  # below the folder in which verifiers have their adapters
    digest: str  # of its files, in hexadecimal

    def __post_init__(self) -> None:
        if not 1 <= len(self.folder) <= MAX_FOLDER:
            raise InvalidRequest("adapter.folder", f"has {len(self.folder)} characters, must have 1 to {MAX_FOLDER}")
        if not ADAPTER_DIGEST.fullmatch(self.digest):
            raise InvalidRequest("adapter.digest", "must be 16 bytes")


@dataclass(frozen=True, slots=True)
class Contract:
    """The immutable terms of one generation. Raises InvalidRequest, which names the field, for a value out of range.

    Lists may be given as any sequence, `logit_bias` also as a mapping; they are stored as sorted tuples.
    """

    seed: int  # 0 .. 2**64 - 1
    max_tokens: int  # new tokens at most
    choice: int = 0  # number of the sample among several for one prompt, 0 .. 2**32 - 1
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0  # 1 keeps all
    min_p: float = 0.0  # share of the likeliest token's probability; 0 keeps all
    repetition_penalty: float = 1.0  # on tokens of the session, prompts included; 1: none
    presence_penalty: float = 0.0  # on tokens of the answer
    frequency_penalty: float = 0.0  # on tokens of the answer, times their count
    logit_bias: tuple[tuple[int, float], ...] = ()  # (id, number that is added to its logit)
    allowed_ids: tuple[int, ...] = ()  # the only ids that may be chosen; empty: all
    banned_ids: tuple[int, ...] = ()  # ids that may not be chosen
    min_tokens: int = 0  # tokens of the answer before a stop id may be chosen
    stop_ids: tuple[int, ...] = ()  # ids that end the generation
    rule: str = SHARED_NOISE
    lenience: float = 1.0  # of lenient speculative sampling; 1 is lossless
    typical_epsilon: float = 0.09  # of typical acceptance: upper threshold
    typical_delta: float = 0.3  # of typical acceptance: factor of the entropy's threshold
    grammar: Grammar | None = None  # what the answer has to be; None: anything
    adapter: Adapter | None = None  # the target's adapter for this session; None: the model as it is
    logprobs: int | None = None  # alternatives with log-probabilities beside each token's own; None: none at all
    prompt_logprobs: int | None = None  # alternatives beside each token of the prompt; None: none at all

    def __post_init__(self) -> None:
        biased = dict(self.logit_bias)
        checks = (
            ("seed", 0 <= self.seed < 2**64, "an integer from 0 to 2**64 - 1"),
            ("choice", 0 <= self.choice < 2**32, "an integer from 0 to 2**32 - 1"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "a number from 0 to 100"),
            ("top_k", 0 <= self.top_k < 2**31, "0 (all) or a positive integer"),
            ("top_p", 0.0 < self.top_p <= 1.0, "a number above 0 and at most 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "a number from 0 to 1"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 100.0, "a number above 0 and at most 100"),
            ("presence_penalty", -100.0 <= self.presence_penalty <= 100.0, "a number from -100 to 100"),
            ("frequency_penalty", -100.0 <= self.frequency_penalty <= 100.0, "a number from -100 to 100"),
            ("logit_bias", len(biased) <= MAX_LISTED, f"at most {MAX_LISTED} entries"),
            (
                "logit_bias",
                all(abs(by) <= MAX_BIAS for by in biased.values()),
                f"-{MAX_BIAS:g} to {MAX_BIAS:g} for each",
            ),
            ("banned_ids", len(self.banned_ids) <= MAX_LISTED, f"at most {MAX_LISTED} ids"),
            ("allowed_ids", len(self.allowed_ids) <= MAX_LISTED, f"at most {MAX_LISTED} ids"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "0 to max_tokens"),
            ("stop_ids", len(self.stop_ids) <= MAX_STOP_IDS, f"at most {MAX_STOP_IDS} ids"),
            ("rule", self.rule in RULES, f"one of {', '.join(RULES)}"),
            ("lenience", 0.0 < self.lenience <= 1.0, "a number above 0 and at most 1"),
            ("lenience", self.lenience == 1.0 or self.rule == LENIENT, f"1, unless the rule is {LENIENT}: it is lossy"),
            ("typical_epsilon", 0.0 <= self.typical_epsilon <= 1.0, "a number from 0 to 1"),
            ("typical_delta", 0.0 <= self.typical_delta <= 1.0, "a number from 0 to 1"),
            ("logprobs", 0 <= (self.logprobs or 0) <= MAX_LOGPROBS, f"absent or 0 to {MAX_LOGPROBS}"),
            ("prompt_logprobs", 0 <= (self.prompt_logprobs or 0) <= MAX_LOGPROBS, f"absent or 0 to {MAX_LOGPROBS}"),
        )
        for field, holds, allowed in checks:
            if not holds:
                raise InvalidRequest(field, f"is {reprlib.repr(getattr(self, field))}, must be {allowed}")
        if self.temperature < LEAST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        object.__setattr__(self, "logit_bias", tuple(sorted(biased.items())))
        for listed in ("allowed_ids", "banned_ids", "stop_ids"):
            object.__setattr__(self, listed, tuple(sorted(set(getattr(self, listed)))))

    @classmethod
    def names(cls) -> frozenset[str]:
        """Return the names of all fields, which requests and messages share."""
        return frozenset(field.name for field in fields(cls))

    def check_vocabulary(self, vocabulary: int, unpadded_vocabulary: int | None = None) -> None:
        """Raise InvalidRequest for an id outside the vocabulary, or when the contract allows no id of it.

        `unpadded_vocabulary`, where it is given, bounds the ids that the target can choose: they are below it.
        """
        for field in ("logit_bias", "allowed_ids", "banned_ids", "stop_ids"):
            ids = [id_ for id_, _ in self.logit_bias] if field == "logit_bias" else getattr(self, field)
            if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
                worst = max(ids) if max(ids) >= vocabulary else min(ids)
                raise InvalidRequest(field, f"token id {worst} is outside the vocabulary (0 to {vocabulary - 1})")
        if not self.allows_any(vocabulary if unpadded_vocabulary is None else unpadded_vocabulary):
            raise InvalidRequest(
                "allowed_ids", "and banned_ids (and, with min_tokens, stop ids) leave no token to choose"
            )

    def allows_any(self, vocabulary: int) -> bool:
        """Return whether at every position of the answer an id below `vocabulary` may be chosen."""
        forbidden = {*self.banned_ids, *(self.stop_ids if self.min_tokens else ())}
        return any(id_ < vocabulary and id_ not in forbidden for id_ in self.allowed_ids or range(vocabulary))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self.temperature == 0.0

    @property
    def temperature_bucket(self) -> str:
        """The temperature bucket, within which sessions share acceptance statistics; greedy has its own bucket."""
        t = self.temperature
        return "greedy" if t == 0 else "cool" if t <= 0.5 else "warm" if t <= 0.8 else "hot"

    @property
    def cuts(self) -> bool:
        """Whether top-k, top-p or min-p excludes unlikely tokens."""
        return (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0)

    @property
    def restricts(self) -> bool:
        """Whether penalties, a bias, lists of allowed or banned ids, or a grammar change the model's distribution."""
        return self.penalizes or bool(self.logit_bias or self.allowed_ids or self.banned_ids or self.grammar)

    @property
    def unrestricted(self) -> bool:
        """Whether seed and temperature alone choose among the model's tokens, and no log-probabilities are wanted."""
        return not (self.restricts or (self.cuts and not self.greedy) or self.logprobs is not None)

    @property
    def representative(self) -> bool:
        """Whether what a generation under this contract shows of drafters and texts also holds for others.

        It does not where the caller decides what drafts are worth: by penalties, biases and lists of ids, by stop ids
        that `min_tokens` bans, by filters or a temperature that leave one choice or any, and by a lossy rule, whose
        thresholds may accept everything. Filters change nothing of greedy decoding. Nor does it where the target has
        an adapter, which drafters do not know.
        """
        filtered = (
            0 < self.top_k < MIN_USUAL_TOP_K or self.top_p < MIN_USUAL_TOP_P or self.min_p > MAX_USUAL_MIN_P
        ) and not self.greedy
        bans_stops = bool(self.min_tokens and self.stop_ids)
        hot = self.temperature > MAX_USUAL_TEMPERATURE
        return not (self.restricts or self.adapter or bans_stops or filtered or hot or self.lossy)

    def kv_scope(self, tenant: str) -> str:
        """Return within what the KV of a tenant's texts may be shared: those of one tenant with the same adapter."""
        return tenant if self.adapter is None else f"{tenant}\0{self.adapter.digest}"

    def own_or_shared(self, shared: EstimatesT) -> EstimatesT:
        """Return the estimates that a session under this contract uses and updates: the shared ones, or a copy of its
        own where the contract is not representative."""
        return shared if self.representative else deepcopy(shared)

    @property
    def lossy(self) -> bool:
        """Whether, because of the rule, the text's distribution differs from the target's own."""
        return self.rule in LOSSY

    @property
    def penalizes(self) -> bool:
        """Whether a token's probability depends on how often the token occurred before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


class PlanOverlap(IntEnum):
    """Whether drafters draft while a step runs."""

    MEASURED = 0  # where that was measured to be faster
    ALWAYS = 1
    NEVER = 2
    ROUNDS = 3  # never; also, a step begins only when the tree has the plan's depth, and takes the whole tree


@dataclass(frozen=True, slots=True)
class Plan:
    """Ceilings on speculation for one session. A higher version replaces a lower one."""

    version: int = 0
    depth: int = 0  # gamma: tokens beyond the root; 0 is no speculation
    width: int = 4  # children of one node
    nodes: int = 32  # nodes of the session in one verifier step
    wait_us: int = 500_000  # longest hold of a step, in microseconds
    overlap: PlanOverlap = PlanOverlap.MEASURED

    def __post_init__(self) -> None:
        limits = (("depth", 64), ("width", 64), ("nodes", 1024), ("wait_us", 10_000_000), ("overlap", 3))
        for field, largest in limits:
            if not 0 <= getattr(self, field) <= largest:
                raise InvalidRequest(f"plan.{field}", f"is {getattr(self, field)}, must be 0 to {largest}")
        object.__setattr__(self, "overlap", PlanOverlap(self.overlap))  # the wire gives a number


OFF = Plan(depth=0, nodes=0, wait_us=0)


class SentTerms(NamedTuple):
    """What drafting is worth, as an upstream sends it to its drafters with each commit."""

    min_path_score: float = 0.0  # path score below which drafters need not draft; at 1 they rest
    time_cost_tokens_per_s: float = 0.0  # what a second is worth while a step waits for drafters; 0: no step waits
    ahead: bool = False  # whether drafters go on below nodes that may be in verification


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of one verifier step for one session. Fields that end in `_us` are in microseconds."""

    verified: int = 0  # nodes verified
    accepted: int = 0  # verified nodes that were committed
    verified_depth: int = 0  # depth of the deepest verified node
    waited_us: int = 0
    forward_us: int = 0
    wire_bytes: int = 0  # bytes on drafters' streams since the last report, both directions
    plan_version: int = 0
    drafters: int = 0
    elapsed_us: int = 0  # from the session's previous commit to this one; 0 for its first
    rows: int = 0  # tokens in the pass, over all its sessions
    sessions: int = 0  # sessions in the pass
    first_us: int = 0  # from the previous commit to the first delta after it; 0: a pass ran meanwhile, or none arrived
    level_us: int = 0  # between two of these deltas, on average; 0 as for `first_us`
    ranks: bytes = b""  # for each accepted node, how many of its siblings had a better score
    resting: bool = False  # whether steps were measured to be faster while drafters rest
    plain_rate: int = 0  # thousandths of a token per second, of all sessions, while drafters rest; 0: not measured
    drafted_rate: int = 0  # the same measure when drafters last drafted; 0: not measured
