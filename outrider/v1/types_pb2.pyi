from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Overlap(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OVERLAP_MEASURED: _ClassVar[Overlap]
    OVERLAP_ALWAYS: _ClassVar[Overlap]
    OVERLAP_NEVER: _ClassVar[Overlap]
    OVERLAP_ROUNDS: _ClassVar[Overlap]

class SpeculationReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPECULATION_REASON_UNKNOWN: _ClassVar[SpeculationReason]
    SPECULATION_REASON_DRAFTING: _ClassVar[SpeculationReason]
    SPECULATION_REASON_STARTING: _ClassVar[SpeculationReason]
    SPECULATION_REASON_LATE: _ClassVar[SpeculationReason]
    SPECULATION_REASON_REJECTED: _ClassVar[SpeculationReason]
    SPECULATION_REASON_NO_DRAFTER: _ClassVar[SpeculationReason]
    SPECULATION_REASON_OTHER_TOKENIZER: _ClassVar[SpeculationReason]
    SPECULATION_REASON_OTHER_TARGET: _ClassVar[SpeculationReason]
    SPECULATION_REASON_RULE: _ClassVar[SpeculationReason]
    SPECULATION_REASON_BUSY: _ClassVar[SpeculationReason]
    SPECULATION_REASON_UNREACHABLE: _ClassVar[SpeculationReason]
    SPECULATION_REASON_REFUSED: _ClassVar[SpeculationReason]
    SPECULATION_REASON_TREELESS: _ClassVar[SpeculationReason]
    SPECULATION_REASON_RESTING: _ClassVar[SpeculationReason]
    SPECULATION_REASON_OFF_BY_REQUEST: _ClassVar[SpeculationReason]
    SPECULATION_REASON_OFF_BY_ROUTER: _ClassVar[SpeculationReason]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_DEADLINE: _ClassVar[FinishReason]
    FINISH_REASON_ABANDONED: _ClassVar[FinishReason]
    FINISH_REASON_FAILED: _ClassVar[FinishReason]
OVERLAP_MEASURED: Overlap
OVERLAP_ALWAYS: Overlap
OVERLAP_NEVER: Overlap
OVERLAP_ROUNDS: Overlap
SPECULATION_REASON_UNKNOWN: SpeculationReason
SPECULATION_REASON_DRAFTING: SpeculationReason
SPECULATION_REASON_STARTING: SpeculationReason
SPECULATION_REASON_LATE: SpeculationReason
SPECULATION_REASON_REJECTED: SpeculationReason
SPECULATION_REASON_NO_DRAFTER: SpeculationReason
SPECULATION_REASON_OTHER_TOKENIZER: SpeculationReason
SPECULATION_REASON_OTHER_TARGET: SpeculationReason
SPECULATION_REASON_RULE: SpeculationReason
SPECULATION_REASON_BUSY: SpeculationReason
SPECULATION_REASON_UNREACHABLE: SpeculationReason
SPECULATION_REASON_REFUSED: SpeculationReason
SPECULATION_REASON_TREELESS: SpeculationReason
SPECULATION_REASON_RESTING: SpeculationReason
SPECULATION_REASON_OFF_BY_REQUEST: SpeculationReason
SPECULATION_REASON_OFF_BY_ROUTER: SpeculationReason
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_DEADLINE: FinishReason
FINISH_REASON_ABANDONED: FinishReason
FINISH_REASON_FAILED: FinishReason

class Contract(_message.Message):
    __slots__ = ("seed", "choice", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_ids", "banned_ids", "min_tokens", "rule", "lenience", "typical_epsilon", "typical_delta", "max_tokens", "stop_ids", "logprobs", "grammar", "adapter", "prompt_logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_IDS_FIELD_NUMBER: _ClassVar[int]
    BANNED_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    LENIENCE_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_EPSILON_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_DELTA_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    seed: int
    choice: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_ids: _containers.RepeatedScalarFieldContainer[int]
    banned_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    rule: str
    lenience: float
    typical_epsilon: float
    typical_delta: float
    max_tokens: int
    stop_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    grammar: Grammar
    adapter: Adapter
    prompt_logprobs: int
    def __init__(self, seed: _Optional[int] = ..., choice: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_ids: _Optional[_Iterable[int]] = ..., banned_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., rule: _Optional[str] = ..., lenience: _Optional[float] = ..., typical_epsilon: _Optional[float] = ..., typical_delta: _Optional[float] = ..., max_tokens: _Optional[int] = ..., stop_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("folder", "digest")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    folder: str
    digest: bytes
    def __init__(self, folder: _Optional[str] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text", "reasoning")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    reasoning: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ..., reasoning: _Optional[str] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("version", "depth", "width", "nodes", "wait_us", "overlap")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    WAIT_US_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_FIELD_NUMBER: _ClassVar[int]
    version: int
    depth: int
    width: int
    nodes: int
    wait_us: int
    overlap: Overlap
    def __init__(self, version: _Optional[int] = ..., depth: _Optional[int] = ..., width: _Optional[int] = ..., nodes: _Optional[int] = ..., wait_us: _Optional[int] = ..., overlap: _Optional[_Union[Overlap, str]] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("verified", "accepted", "verified_depth", "waited_us", "forward_us", "wire_bytes", "plan_version", "drafters", "elapsed_us", "rows", "sessions", "first_us", "level_us", "ranks", "resting", "plain_rate", "drafted_rate")
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_DEPTH_FIELD_NUMBER: _ClassVar[int]
    WAITED_US_FIELD_NUMBER: _ClassVar[int]
    FORWARD_US_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_US_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    FIRST_US_FIELD_NUMBER: _ClassVar[int]
    LEVEL_US_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    RESTING_FIELD_NUMBER: _ClassVar[int]
    PLAIN_RATE_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_RATE_FIELD_NUMBER: _ClassVar[int]
    verified: int
    accepted: int
    verified_depth: int
    waited_us: int
    forward_us: int
    wire_bytes: int
    plan_version: int
    drafters: int
    elapsed_us: int
    rows: int
    sessions: int
    first_us: int
    level_us: int
    ranks: bytes
    resting: bool
    plain_rate: int
    drafted_rate: int
    def __init__(self, verified: _Optional[int] = ..., accepted: _Optional[int] = ..., verified_depth: _Optional[int] = ..., waited_us: _Optional[int] = ..., forward_us: _Optional[int] = ..., wire_bytes: _Optional[int] = ..., plan_version: _Optional[int] = ..., drafters: _Optional[int] = ..., elapsed_us: _Optional[int] = ..., rows: _Optional[int] = ..., sessions: _Optional[int] = ..., first_us: _Optional[int] = ..., level_us: _Optional[int] = ..., ranks: _Optional[bytes] = ..., resting: _Optional[bool] = ..., plain_rate: _Optional[int] = ..., drafted_rate: _Optional[int] = ...) -> None: ...

class SpeculationStatus(_message.Message):
    __slots__ = ("reason", "detail", "steps", "plain_rate", "drafted_rate")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_RATE_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_RATE_FIELD_NUMBER: _ClassVar[int]
    reason: SpeculationReason
    detail: str
    steps: int
    plain_rate: int
    drafted_rate: int
    def __init__(self, reason: _Optional[_Union[SpeculationReason, str]] = ..., detail: _Optional[str] = ..., steps: _Optional[int] = ..., plain_rate: _Optional[int] = ..., drafted_rate: _Optional[int] = ...) -> None: ...

class StepTree(_message.Message):
    __slots__ = ("position", "committed", "tokens", "parents", "edges", "accepted", "drafters", "senders", "left_out", "report", "plan", "missed", "texts", "committed_texts", "hidden")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    EDGES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    SENDERS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TEXTS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    position: int
    committed: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    edges: bytes
    accepted: _containers.RepeatedScalarFieldContainer[int]
    drafters: _containers.RepeatedScalarFieldContainer[str]
    senders: _containers.RepeatedScalarFieldContainer[int]
    left_out: int
    report: StepReport
    plan: Plan
    missed: int
    texts: _containers.RepeatedScalarFieldContainer[bytes]
    committed_texts: _containers.RepeatedScalarFieldContainer[bytes]
    hidden: int
    def __init__(self, position: _Optional[int] = ..., committed: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., edges: _Optional[bytes] = ..., accepted: _Optional[_Iterable[int]] = ..., drafters: _Optional[_Iterable[str]] = ..., senders: _Optional[_Iterable[int]] = ..., left_out: _Optional[int] = ..., report: _Optional[_Union[StepReport, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., missed: _Optional[int] = ..., texts: _Optional[_Iterable[bytes]] = ..., committed_texts: _Optional[_Iterable[bytes]] = ..., hidden: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("steps", "running_ms")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_MS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    running_ms: int
    def __init__(self, steps: _Optional[int] = ..., running_ms: _Optional[int] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("session_id", "tenant", "drafter_id", "upstream_id", "epoch", "expires_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_ID_FIELD_NUMBER: _ClassVar[int]
    UPSTREAM_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    tenant: str
    drafter_id: str
    upstream_id: str
    epoch: int
    expires_ms: int
    def __init__(self, session_id: _Optional[str] = ..., tenant: _Optional[str] = ..., drafter_id: _Optional[str] = ..., upstream_id: _Optional[str] = ..., epoch: _Optional[int] = ..., expires_ms: _Optional[int] = ...) -> None: ...

class SignedTicket(_message.Message):
    __slots__ = ("ticket", "public_key", "signature")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    public_key: bytes
    signature: bytes
    def __init__(self, ticket: _Optional[bytes] = ..., public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Error(_message.Message):
    __slots__ = ("kind", "details", "field", "retry_after_ms")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    details: str
    field: str
    retry_after_ms: int
    def __init__(self, kind: _Optional[str] = ..., details: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...
