from outrider.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecodeRequest(_message.Message):
    __slots__ = ("start", "plans", "acknowledged", "durable", "cancelled")
    START_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    start: DecodeStart
    plans: _containers.RepeatedCompositeFieldContainer[PlanChange]
    acknowledged: _containers.RepeatedScalarFieldContainer[int]
    durable: _containers.RepeatedScalarFieldContainer[int]
    cancelled: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, start: _Optional[_Union[DecodeStart, _Mapping]] = ..., plans: _Optional[_Iterable[_Union[PlanChange, _Mapping]]] = ..., acknowledged: _Optional[_Iterable[int]] = ..., durable: _Optional[_Iterable[int]] = ..., cancelled: _Optional[_Iterable[int]] = ...) -> None: ...

class PlanChange(_message.Message):
    __slots__ = ("handle", "plan")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    handle: int
    plan: _types_pb2.Plan
    def __init__(self, handle: _Optional[int] = ..., plan: _Optional[_Union[_types_pb2.Plan, _Mapping]] = ...) -> None: ...

class DecodeStart(_message.Message):
    __slots__ = ("session_id", "epoch", "model", "tokenizer_digest", "tokens", "digest", "answer_position", "contract", "plan", "window", "tenant", "lease_ms", "handle", "trace", "scored")
    class TraceEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ANSWER_POSITION_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    model: str
    tokenizer_digest: bytes
    tokens: _containers.RepeatedScalarFieldContainer[int]
    digest: int
    answer_position: int
    contract: _types_pb2.Contract
    plan: _types_pb2.Plan
    window: int
    tenant: str
    lease_ms: int
    handle: int
    trace: _containers.ScalarMap[str, str]
    scored: int
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., model: _Optional[str] = ..., tokenizer_digest: _Optional[bytes] = ..., tokens: _Optional[_Iterable[int]] = ..., digest: _Optional[int] = ..., answer_position: _Optional[int] = ..., contract: _Optional[_Union[_types_pb2.Contract, _Mapping]] = ..., plan: _Optional[_Union[_types_pb2.Plan, _Mapping]] = ..., window: _Optional[int] = ..., tenant: _Optional[str] = ..., lease_ms: _Optional[int] = ..., handle: _Optional[int] = ..., trace: _Optional[_Mapping[str, str]] = ..., scored: _Optional[int] = ...) -> None: ...

class WarmRequest(_message.Message):
    __slots__ = ("model", "tokenizer_digest", "tokens", "tenant", "adapter")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    model: str
    tokenizer_digest: bytes
    tokens: _containers.RepeatedScalarFieldContainer[int]
    tenant: str
    adapter: _types_pb2.Adapter
    def __init__(self, model: _Optional[str] = ..., tokenizer_digest: _Optional[bytes] = ..., tokens: _Optional[_Iterable[int]] = ..., tenant: _Optional[str] = ..., adapter: _Optional[_Union[_types_pb2.Adapter, _Mapping]] = ...) -> None: ...

class ReadAdapterRequest(_message.Message):
    __slots__ = ("model", "folder")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    model: str
    folder: str
    def __init__(self, model: _Optional[str] = ..., folder: _Optional[str] = ...) -> None: ...

class ReadAdapterResponse(_message.Message):
    __slots__ = ("digest", "rank", "parameters")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    rank: int
    parameters: int
    def __init__(self, digest: _Optional[bytes] = ..., rank: _Optional[int] = ..., parameters: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class WarmResponse(_message.Message):
    __slots__ = ("cached",)
    CACHED_FIELD_NUMBER: _ClassVar[int]
    cached: int
    def __init__(self, cached: _Optional[int] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("heartbeat", "started", "commits", "ended", "scores")
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    heartbeat: _types_pb2.Heartbeat
    started: _containers.RepeatedCompositeFieldContainer[DecodeStarted]
    commits: _containers.RepeatedCompositeFieldContainer[DecodeCommit]
    ended: _containers.RepeatedCompositeFieldContainer[DecodeEnded]
    scores: _containers.RepeatedCompositeFieldContainer[PromptScores]
    def __init__(self, heartbeat: _Optional[_Union[_types_pb2.Heartbeat, _Mapping]] = ..., started: _Optional[_Iterable[_Union[DecodeStarted, _Mapping]]] = ..., commits: _Optional[_Iterable[_Union[DecodeCommit, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[DecodeEnded, _Mapping]]] = ..., scores: _Optional[_Iterable[_Union[PromptScores, _Mapping]]] = ...) -> None: ...

class DecodeStarted(_message.Message):
    __slots__ = ("cached", "handle", "resting")
    CACHED_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    RESTING_FIELD_NUMBER: _ClassVar[int]
    cached: int
    handle: int
    resting: bool
    def __init__(self, cached: _Optional[int] = ..., handle: _Optional[int] = ..., resting: _Optional[bool] = ...) -> None: ...

class DecodeCommit(_message.Message):
    __slots__ = ("epoch", "position", "tokens", "gaps", "digest", "report", "contributions", "logprobs", "handle")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    position: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    gaps: _containers.RepeatedScalarFieldContainer[float]
    digest: int
    report: _types_pb2.StepReport
    contributions: _containers.RepeatedCompositeFieldContainer[DrafterContribution]
    logprobs: bytes
    handle: int
    def __init__(self, epoch: _Optional[int] = ..., position: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., gaps: _Optional[_Iterable[float]] = ..., digest: _Optional[int] = ..., report: _Optional[_Union[_types_pb2.StepReport, _Mapping]] = ..., contributions: _Optional[_Iterable[_Union[DrafterContribution, _Mapping]]] = ..., logprobs: _Optional[bytes] = ..., handle: _Optional[int] = ...) -> None: ...

class PromptScores(_message.Message):
    __slots__ = ("handle", "epoch", "position", "logprobs", "ranks")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    epoch: int
    position: int
    logprobs: bytes
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handle: _Optional[int] = ..., epoch: _Optional[int] = ..., position: _Optional[int] = ..., logprobs: _Optional[bytes] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class DrafterContribution(_message.Message):
    __slots__ = ("drafter_id", "verified", "accepted", "alone")
    DRAFTER_ID_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    drafter_id: str
    verified: int
    accepted: int
    alone: int
    def __init__(self, drafter_id: _Optional[str] = ..., verified: _Optional[int] = ..., accepted: _Optional[int] = ..., alone: _Optional[int] = ...) -> None: ...

class DecodeEnded(_message.Message):
    __slots__ = ("handle", "reason", "error")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    handle: int
    reason: _types_pb2.FinishReason
    error: _types_pb2.Error
    def __init__(self, handle: _Optional[int] = ..., reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ...) -> None: ...

class VerifierDescription(_message.Message):
    __slots__ = ("worker_id", "model", "tokenizer_digest", "vocabulary", "context", "slots", "sessions", "drafters", "steps", "dtype", "parameters", "step_costs", "refused_frames", "numerics", "warm", "tasks", "weight_bytes", "kv_bytes", "step_times", "overlap_mode", "control", "treeless", "ranks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    STEP_COSTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FRAMES_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    WARM_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMES_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_MODE_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    TREELESS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    model: str
    tokenizer_digest: bytes
    vocabulary: int
    context: int
    slots: int
    sessions: int
    drafters: int
    steps: int
    dtype: str
    parameters: int
    step_costs: _containers.RepeatedCompositeFieldContainer[StepCost]
    refused_frames: int
    numerics: str
    warm: int
    tasks: int
    weight_bytes: int
    kv_bytes: int
    step_times: StepTimes
    overlap_mode: str
    control: Control
    treeless: str
    ranks: int
    def __init__(self, worker_id: _Optional[str] = ..., model: _Optional[str] = ..., tokenizer_digest: _Optional[bytes] = ..., vocabulary: _Optional[int] = ..., context: _Optional[int] = ..., slots: _Optional[int] = ..., sessions: _Optional[int] = ..., drafters: _Optional[int] = ..., steps: _Optional[int] = ..., dtype: _Optional[str] = ..., parameters: _Optional[int] = ..., step_costs: _Optional[_Iterable[_Union[StepCost, _Mapping]]] = ..., refused_frames: _Optional[int] = ..., numerics: _Optional[str] = ..., warm: _Optional[int] = ..., tasks: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., step_times: _Optional[_Union[StepTimes, _Mapping]] = ..., overlap_mode: _Optional[str] = ..., control: _Optional[_Union[Control, _Mapping]] = ..., treeless: _Optional[str] = ..., ranks: _Optional[int] = ...) -> None: ...

class Control(_message.Message):
    __slots__ = ("arm", "reason", "tokens_per_s", "plain_tokens_per_s", "plain_error", "delay_budget_s", "comparisons")
    ARM_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PLAIN_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PLAIN_ERROR_FIELD_NUMBER: _ClassVar[int]
    DELAY_BUDGET_S_FIELD_NUMBER: _ClassVar[int]
    COMPARISONS_FIELD_NUMBER: _ClassVar[int]
    arm: str
    reason: str
    tokens_per_s: float
    plain_tokens_per_s: float
    plain_error: float
    delay_budget_s: float
    comparisons: _containers.RepeatedCompositeFieldContainer[ArmComparison]
    def __init__(self, arm: _Optional[str] = ..., reason: _Optional[str] = ..., tokens_per_s: _Optional[float] = ..., plain_tokens_per_s: _Optional[float] = ..., plain_error: _Optional[float] = ..., delay_budget_s: _Optional[float] = ..., comparisons: _Optional[_Iterable[_Union[ArmComparison, _Mapping]]] = ...) -> None: ...

class ArmComparison(_message.Message):
    __slots__ = ("usual", "arm", "ratio", "low", "high")
    USUAL_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    usual: str
    arm: str
    ratio: float
    low: float
    high: float
    def __init__(self, usual: _Optional[str] = ..., arm: _Optional[str] = ..., ratio: _Optional[float] = ..., low: _Optional[float] = ..., high: _Optional[float] = ...) -> None: ...

class StepTimes(_message.Message):
    __slots__ = ("rows", "forward_us", "waited_us", "overhead_us")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_US_FIELD_NUMBER: _ClassVar[int]
    WAITED_US_FIELD_NUMBER: _ClassVar[int]
    OVERHEAD_US_FIELD_NUMBER: _ClassVar[int]
    rows: int
    forward_us: int
    waited_us: int
    overhead_us: int
    def __init__(self, rows: _Optional[int] = ..., forward_us: _Optional[int] = ..., waited_us: _Optional[int] = ..., overhead_us: _Optional[int] = ...) -> None: ...

class StepCost(_message.Message):
    __slots__ = ("tokens", "microseconds")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    microseconds: int
    def __init__(self, tokens: _Optional[int] = ..., microseconds: _Optional[int] = ...) -> None: ...
