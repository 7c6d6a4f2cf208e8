from outrider.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftUp(_message.Message):
    __slots__ = ("hello", "subscribe", "unsubscribe", "delta", "heartbeat", "deltas")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    UNSUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    subscribe: Subscribe
    unsubscribe: Unsubscribe
    delta: TreeDelta
    heartbeat: _types_pb2.Heartbeat
    deltas: _containers.RepeatedCompositeFieldContainer[TreeDelta]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., subscribe: _Optional[_Union[Subscribe, _Mapping]] = ..., unsubscribe: _Optional[_Union[Unsubscribe, _Mapping]] = ..., delta: _Optional[_Union[TreeDelta, _Mapping]] = ..., heartbeat: _Optional[_Union[_types_pb2.Heartbeat, _Mapping]] = ..., deltas: _Optional[_Iterable[_Union[TreeDelta, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("drafter_id", "tokenizer_digest", "vocabulary", "public_sources", "batches")
    DRAFTER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_SOURCES_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    drafter_id: str
    tokenizer_digest: bytes
    vocabulary: int
    public_sources: bool
    batches: bool
    def __init__(self, drafter_id: _Optional[str] = ..., tokenizer_digest: _Optional[bytes] = ..., vocabulary: _Optional[int] = ..., public_sources: _Optional[bool] = ..., batches: _Optional[bool] = ...) -> None: ...

class Subscribe(_message.Message):
    __slots__ = ("session_id", "epoch", "attachment", "ticket", "features")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    attachment: int
    ticket: bytes
    features: bytes
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., attachment: _Optional[int] = ..., ticket: _Optional[bytes] = ..., features: _Optional[bytes] = ...) -> None: ...

class Unsubscribe(_message.Message):
    __slots__ = ("attachment",)
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    attachment: int
    def __init__(self, attachment: _Optional[int] = ...) -> None: ...

class TreeDelta(_message.Message):
    __slots__ = ("attachment", "epoch", "root_position", "root_digest", "first_id", "parents", "tokens", "edges", "plan_version", "exhausted", "drawn", "origin", "rescored", "rescored_edges", "rescore_version", "span")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROOT_POSITION_FIELD_NUMBER: _ClassVar[int]
    ROOT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_ID_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EDGES_FIELD_NUMBER: _ClassVar[int]
    PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    EXHAUSTED_FIELD_NUMBER: _ClassVar[int]
    DRAWN_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    RESCORED_FIELD_NUMBER: _ClassVar[int]
    RESCORED_EDGES_FIELD_NUMBER: _ClassVar[int]
    RESCORE_VERSION_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    attachment: int
    epoch: int
    root_position: int
    root_digest: int
    first_id: int
    parents: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    edges: bytes
    plan_version: int
    exhausted: bool
    drawn: _containers.RepeatedCompositeFieldContainer[DrawnFrom]
    origin: str
    rescored: _containers.RepeatedScalarFieldContainer[int]
    rescored_edges: bytes
    rescore_version: int
    span: bytes
    def __init__(self, attachment: _Optional[int] = ..., epoch: _Optional[int] = ..., root_position: _Optional[int] = ..., root_digest: _Optional[int] = ..., first_id: _Optional[int] = ..., parents: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., edges: _Optional[bytes] = ..., plan_version: _Optional[int] = ..., exhausted: _Optional[bool] = ..., drawn: _Optional[_Iterable[_Union[DrawnFrom, _Mapping]]] = ..., origin: _Optional[str] = ..., rescored: _Optional[_Iterable[int]] = ..., rescored_edges: _Optional[bytes] = ..., rescore_version: _Optional[int] = ..., span: _Optional[bytes] = ...) -> None: ...

class DrawnFrom(_message.Message):
    __slots__ = ("tokens", "weights")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[int]] = ...) -> None: ...

class DraftDown(_message.Message):
    __slots__ = ("welcome", "snapshot", "commit", "closed", "heartbeat", "hints", "commits")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    snapshot: Snapshot
    commit: Commit
    closed: Closed
    heartbeat: _types_pb2.Heartbeat
    hints: Hints
    commits: _containers.RepeatedCompositeFieldContainer[Commit]
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., closed: _Optional[_Union[Closed, _Mapping]] = ..., heartbeat: _Optional[_Union[_types_pb2.Heartbeat, _Mapping]] = ..., hints: _Optional[_Union[Hints, _Mapping]] = ..., commits: _Optional[_Iterable[_Union[Commit, _Mapping]]] = ...) -> None: ...

class Hints(_message.Message):
    __slots__ = ("attachment", "epoch", "root_position", "parents", "tokens", "edges")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROOT_POSITION_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EDGES_FIELD_NUMBER: _ClassVar[int]
    attachment: int
    epoch: int
    root_position: int
    parents: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    edges: bytes
    def __init__(self, attachment: _Optional[int] = ..., epoch: _Optional[int] = ..., root_position: _Optional[int] = ..., parents: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., edges: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("upstream_id", "batches")
    UPSTREAM_ID_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    upstream_id: str
    batches: bool
    def __init__(self, upstream_id: _Optional[str] = ..., batches: _Optional[bool] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("attachment", "epoch", "position", "tokens", "last", "digest", "contract", "plan", "credit", "min_path_score", "time_cost_tokens_per_s", "ahead", "answer_position", "features", "vocabulary", "unpadded_vocabulary")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    MIN_PATH_SCORE_FIELD_NUMBER: _ClassVar[int]
    TIME_COST_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    ANSWER_POSITION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    UNPADDED_VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    attachment: int
    epoch: int
    position: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    last: bool
    digest: int
    contract: _types_pb2.Contract
    plan: _types_pb2.Plan
    credit: int
    min_path_score: float
    time_cost_tokens_per_s: float
    ahead: bool
    answer_position: int
    features: bytes
    vocabulary: int
    unpadded_vocabulary: int
    def __init__(self, attachment: _Optional[int] = ..., epoch: _Optional[int] = ..., position: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., last: _Optional[bool] = ..., digest: _Optional[int] = ..., contract: _Optional[_Union[_types_pb2.Contract, _Mapping]] = ..., plan: _Optional[_Union[_types_pb2.Plan, _Mapping]] = ..., credit: _Optional[int] = ..., min_path_score: _Optional[float] = ..., time_cost_tokens_per_s: _Optional[float] = ..., ahead: _Optional[bool] = ..., answer_position: _Optional[int] = ..., features: _Optional[bytes] = ..., vocabulary: _Optional[int] = ..., unpadded_vocabulary: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("attachment", "epoch", "position", "tokens", "digest", "plan", "min_path_score", "credit", "dropped", "time_cost_tokens_per_s", "ahead", "features")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    MIN_PATH_SCORE_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    TIME_COST_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    attachment: int
    epoch: int
    position: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    digest: int
    plan: _types_pb2.Plan
    min_path_score: float
    credit: int
    dropped: _containers.RepeatedScalarFieldContainer[int]
    time_cost_tokens_per_s: float
    ahead: bool
    features: bytes
    def __init__(self, attachment: _Optional[int] = ..., epoch: _Optional[int] = ..., position: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., digest: _Optional[int] = ..., plan: _Optional[_Union[_types_pb2.Plan, _Mapping]] = ..., min_path_score: _Optional[float] = ..., credit: _Optional[int] = ..., dropped: _Optional[_Iterable[int]] = ..., time_cost_tokens_per_s: _Optional[float] = ..., ahead: _Optional[bool] = ..., features: _Optional[bytes] = ...) -> None: ...

class Closed(_message.Message):
    __slots__ = ("attachment", "reason")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    attachment: int
    reason: str
    def __init__(self, attachment: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("session_id", "epoch", "upstream", "ticket", "tenant", "upstream_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UPSTREAM_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    UPSTREAM_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    upstream: str
    ticket: bytes
    tenant: str
    upstream_id: str
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., upstream: _Optional[str] = ..., ticket: _Optional[bytes] = ..., tenant: _Optional[str] = ..., upstream_id: _Optional[str] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("refused", "unreachable")
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    refused: str
    unreachable: str
    def __init__(self, refused: _Optional[str] = ..., unreachable: _Optional[str] = ...) -> None: ...

class DetachRequest(_message.Message):
    __slots__ = ("session_id", "epoch", "why")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    why: str
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class DetachResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrafterDescription(_message.Message):
    __slots__ = ("worker_id", "model", "tokenizer_digest", "vocabulary", "context", "slots", "sessions", "levels", "nodes", "refused_frames", "tasks", "tier", "drafters", "refusals")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FRAMES_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    model: str
    tokenizer_digest: bytes
    vocabulary: int
    context: int
    slots: int
    sessions: int
    levels: int
    nodes: int
    refused_frames: int
    tasks: int
    tier: int
    drafters: int
    refusals: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., model: _Optional[str] = ..., tokenizer_digest: _Optional[bytes] = ..., vocabulary: _Optional[int] = ..., context: _Optional[int] = ..., slots: _Optional[int] = ..., sessions: _Optional[int] = ..., levels: _Optional[int] = ..., nodes: _Optional[int] = ..., refused_frames: _Optional[int] = ..., tasks: _Optional[int] = ..., tier: _Optional[int] = ..., drafters: _Optional[int] = ..., refusals: _Optional[_Iterable[str]] = ...) -> None: ...

class TargetsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TargetList(_message.Message):
    __slots__ = ("targets",)
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    targets: _containers.RepeatedCompositeFieldContainer[DraftTarget]
    def __init__(self, targets: _Optional[_Iterable[_Union[DraftTarget, _Mapping]]] = ...) -> None: ...

class DraftTarget(_message.Message):
    __slots__ = ("model", "tokenizer_digest", "weights", "pass_us")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    PASS_US_FIELD_NUMBER: _ClassVar[int]
    model: str
    tokenizer_digest: bytes
    weights: str
    pass_us: int
    def __init__(self, model: _Optional[str] = ..., tokenizer_digest: _Optional[bytes] = ..., weights: _Optional[str] = ..., pass_us: _Optional[int] = ...) -> None: ...

class GateUp(_message.Message):
    __slots__ = ("drafter", "answer")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    drafter: GatedDrafter
    answer: GateAnswer
    def __init__(self, drafter: _Optional[_Union[GatedDrafter, _Mapping]] = ..., answer: _Optional[_Union[GateAnswer, _Mapping]] = ...) -> None: ...

class GatedDrafter(_message.Message):
    __slots__ = ("drafter_id", "model", "tokenizer_digest", "vocabulary", "context", "slots", "sessions", "parameters", "trained_for", "zone", "protocol", "draining", "sent_us")
    DRAFTER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FOR_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SENT_US_FIELD_NUMBER: _ClassVar[int]
    drafter_id: str
    model: str
    tokenizer_digest: bytes
    vocabulary: int
    context: int
    slots: int
    sessions: int
    parameters: int
    trained_for: str
    zone: str
    protocol: int
    draining: bool
    sent_us: int
    def __init__(self, drafter_id: _Optional[str] = ..., model: _Optional[str] = ..., tokenizer_digest: _Optional[bytes] = ..., vocabulary: _Optional[int] = ..., context: _Optional[int] = ..., slots: _Optional[int] = ..., sessions: _Optional[int] = ..., parameters: _Optional[int] = ..., trained_for: _Optional[str] = ..., zone: _Optional[str] = ..., protocol: _Optional[int] = ..., draining: _Optional[bool] = ..., sent_us: _Optional[int] = ...) -> None: ...

class GateAnswer(_message.Message):
    __slots__ = ("call", "attached", "detached", "error")
    CALL_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    DETACHED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    call: int
    attached: AttachResponse
    detached: DetachResponse
    error: _types_pb2.Error
    def __init__(self, call: _Optional[int] = ..., attached: _Optional[_Union[AttachResponse, _Mapping]] = ..., detached: _Optional[_Union[DetachResponse, _Mapping]] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ...) -> None: ...

class GateDown(_message.Message):
    __slots__ = ("welcome", "call", "status")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    welcome: GateWelcome
    call: GateCall
    status: GateStatus
    def __init__(self, welcome: _Optional[_Union[GateWelcome, _Mapping]] = ..., call: _Optional[_Union[GateCall, _Mapping]] = ..., status: _Optional[_Union[GateStatus, _Mapping]] = ...) -> None: ...

class GateWelcome(_message.Message):
    __slots__ = ("router_id",)
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    def __init__(self, router_id: _Optional[str] = ...) -> None: ...

class GateStatus(_message.Message):
    __slots__ = ("sent_us", "tokens_per_ks")
    SENT_US_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_KS_FIELD_NUMBER: _ClassVar[int]
    sent_us: int
    tokens_per_ks: int
    def __init__(self, sent_us: _Optional[int] = ..., tokens_per_ks: _Optional[int] = ...) -> None: ...

class GateCall(_message.Message):
    __slots__ = ("call", "attach", "detach")
    CALL_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    call: int
    attach: AttachRequest
    detach: DetachRequest
    def __init__(self, call: _Optional[int] = ..., attach: _Optional[_Union[AttachRequest, _Mapping]] = ..., detach: _Optional[_Union[DetachRequest, _Mapping]] = ...) -> None: ...
