from outrider.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    PRIORITY_INTERACTIVE: _ClassVar[Priority]
    PRIORITY_BATCH: _ClassVar[Priority]
PRIORITY_UNSPECIFIED: Priority
PRIORITY_INTERACTIVE: Priority
PRIORITY_BATCH: Priority

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "token_ids", "sampling", "speculation", "session_id", "whole_history", "idempotency_key", "acceptance", "messages", "priority", "route", "tools", "template_variables", "broke_off", "continue_final_message", "omit_generation_prompt", "include_stop", "show_special_tokens", "omit_special_tokens", "truncate_prompt_tokens", "return_prompt", "chat_template")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    WHOLE_HISTORY_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_VARIABLES_FIELD_NUMBER: _ClassVar[int]
    BROKE_OFF_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    OMIT_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    SHOW_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OMIT_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETURN_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    token_ids: TokenIds
    sampling: Sampling
    speculation: Speculation
    session_id: str
    whole_history: bool
    idempotency_key: str
    acceptance: Acceptance
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    priority: Priority
    route: AnswerRoute
    tools: Tools
    template_variables: str
    broke_off: bool
    continue_final_message: bool
    omit_generation_prompt: bool
    include_stop: bool
    show_special_tokens: bool
    omit_special_tokens: bool
    truncate_prompt_tokens: int
    return_prompt: bool
    chat_template: str
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., session_id: _Optional[str] = ..., whole_history: _Optional[bool] = ..., idempotency_key: _Optional[str] = ..., acceptance: _Optional[_Union[Acceptance, _Mapping]] = ..., messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., priority: _Optional[_Union[Priority, str]] = ..., route: _Optional[_Union[AnswerRoute, _Mapping]] = ..., tools: _Optional[_Union[Tools, _Mapping]] = ..., template_variables: _Optional[str] = ..., broke_off: _Optional[bool] = ..., continue_final_message: _Optional[bool] = ..., omit_generation_prompt: _Optional[bool] = ..., include_stop: _Optional[bool] = ..., show_special_tokens: _Optional[bool] = ..., omit_special_tokens: _Optional[bool] = ..., truncate_prompt_tokens: _Optional[int] = ..., return_prompt: _Optional[bool] = ..., chat_template: _Optional[str] = ...) -> None: ...

class Tools(_message.Message):
    __slots__ = ("definitions", "required", "name", "single")
    DEFINITIONS_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SINGLE_FIELD_NUMBER: _ClassVar[int]
    definitions: str
    required: bool
    name: str
    single: bool
    def __init__(self, definitions: _Optional[str] = ..., required: _Optional[bool] = ..., name: _Optional[str] = ..., single: _Optional[bool] = ...) -> None: ...

class AnswerRoute(_message.Message):
    __slots__ = ("stream", "handle")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    stream: bytes
    handle: int
    def __init__(self, stream: _Optional[bytes] = ..., handle: _Optional[int] = ...) -> None: ...

class AnswersRequest(_message.Message):
    __slots__ = ("stream", "handles", "taken")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    stream: bytes
    handles: _containers.RepeatedScalarFieldContainer[int]
    taken: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, stream: _Optional[bytes] = ..., handles: _Optional[_Iterable[int]] = ..., taken: _Optional[_Iterable[int]] = ...) -> None: ...

class AnswersResponse(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[Answer]
    def __init__(self, answers: _Optional[_Iterable[_Union[Answer, _Mapping]]] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("handle", "response")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    response: GenerateResponse
    def __init__(self, handle: _Optional[int] = ..., response: _Optional[_Union[GenerateResponse, _Mapping]] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "content", "tool_calls", "tool_call_id", "reasoning_content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REASONING_CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    tool_calls: str
    tool_call_id: str
    reasoning_content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., tool_calls: _Optional[str] = ..., tool_call_id: _Optional[str] = ..., reasoning_content: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids", "tokenizer_digest")
    IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    tokenizer_digest: bytes
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., tokenizer_digest: _Optional[bytes] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("seed", "choice", "temperature", "top_k", "top_p", "max_tokens", "stop", "ignore_eos", "logprobs", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_ids", "banned_ids", "min_tokens", "stop_ids", "prompt_logprobs", "grammar")
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
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_IDS_FIELD_NUMBER: _ClassVar[int]
    BANNED_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    seed: int
    choice: int
    temperature: float
    top_k: int
    top_p: float
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos: bool
    logprobs: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_ids: _containers.RepeatedScalarFieldContainer[int]
    banned_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    stop_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: int
    grammar: _types_pb2.Grammar
    def __init__(self, seed: _Optional[int] = ..., choice: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_ids: _Optional[_Iterable[int]] = ..., banned_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., stop_ids: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[_Union[_types_pb2.Grammar, _Mapping]] = ...) -> None: ...

class Acceptance(_message.Message):
    __slots__ = ("rule", "lenience", "typical_epsilon", "typical_delta")
    RULE_FIELD_NUMBER: _ClassVar[int]
    LENIENCE_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_EPSILON_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_DELTA_FIELD_NUMBER: _ClassVar[int]
    rule: str
    lenience: float
    typical_epsilon: float
    typical_delta: float
    def __init__(self, rule: _Optional[str] = ..., lenience: _Optional[float] = ..., typical_epsilon: _Optional[float] = ..., typical_delta: _Optional[float] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("policy", "depth")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    policy: str
    depth: int
    def __init__(self, policy: _Optional[str] = ..., depth: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "chunk", "finished", "following")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FOLLOWING_FIELD_NUMBER: _ClassVar[int]
    started: Started
    chunk: Chunk
    finished: Finished
    following: Following
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., following: _Optional[_Union[Following, _Mapping]] = ...) -> None: ...

class Following(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Started(_message.Message):
    __slots__ = ("session_id", "model", "seed", "prompt_tokens", "generation", "cached_tokens", "forked_from", "rule", "lossy", "tool_format", "reasoning", "prompt_token_ids")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORKED_FROM_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    LOSSY_FIELD_NUMBER: _ClassVar[int]
    TOOL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    model: str
    seed: int
    prompt_tokens: int
    generation: int
    cached_tokens: int
    forked_from: str
    rule: str
    lossy: bool
    tool_format: str
    reasoning: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[str] = ..., model: _Optional[str] = ..., seed: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generation: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., forked_from: _Optional[str] = ..., rule: _Optional[str] = ..., lossy: _Optional[bool] = ..., tool_format: _Optional[str] = ..., reasoning: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("text", "token_ids", "gaps", "next_position", "text_offset", "logprobs", "prompt_logprobs")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    NEXT_POSITION_FIELD_NUMBER: _ClassVar[int]
    TEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    gaps: _containers.RepeatedScalarFieldContainer[float]
    next_position: int
    text_offset: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., gaps: _Optional[_Iterable[float]] = ..., next_position: _Optional[int] = ..., text_offset: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs", "text", "top_texts", "id", "rank")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOP_TEXTS_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    text: bytes
    top_texts: _containers.RepeatedScalarFieldContainer[bytes]
    id: int
    rank: int
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., text: _Optional[bytes] = ..., top_texts: _Optional[_Iterable[bytes]] = ..., id: _Optional[int] = ..., rank: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "usage", "stop")
    REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    reason: _types_pb2.FinishReason
    usage: Usage
    stop: str
    def __init__(self, reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., stop: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "steps", "verified", "accepted", "reached_by_depth", "tried_by_depth", "wire_bytes", "first_token_us", "total_us", "decode_us", "speculation", "reasoning_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REACHED_BY_DEPTH_FIELD_NUMBER: _ClassVar[int]
    TRIED_BY_DEPTH_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_US_FIELD_NUMBER: _ClassVar[int]
    TOTAL_US_FIELD_NUMBER: _ClassVar[int]
    DECODE_US_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    steps: int
    verified: int
    accepted: int
    reached_by_depth: _containers.RepeatedScalarFieldContainer[int]
    tried_by_depth: _containers.RepeatedScalarFieldContainer[int]
    wire_bytes: int
    first_token_us: int
    total_us: int
    decode_us: int
    speculation: _types_pb2.SpeculationStatus
    reasoning_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., steps: _Optional[int] = ..., verified: _Optional[int] = ..., accepted: _Optional[int] = ..., reached_by_depth: _Optional[_Iterable[int]] = ..., tried_by_depth: _Optional[_Iterable[int]] = ..., wire_bytes: _Optional[int] = ..., first_token_us: _Optional[int] = ..., total_us: _Optional[int] = ..., decode_us: _Optional[int] = ..., speculation: _Optional[_Union[_types_pb2.SpeculationStatus, _Mapping]] = ..., reasoning_tokens: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("session_id", "generation", "next_position", "text_offset", "route")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NEXT_POSITION_FIELD_NUMBER: _ClassVar[int]
    TEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    generation: int
    next_position: int
    text_offset: int
    route: AnswerRoute
    def __init__(self, session_id: _Optional[str] = ..., generation: _Optional[int] = ..., next_position: _Optional[int] = ..., text_offset: _Optional[int] = ..., route: _Optional[_Union[AnswerRoute, _Mapping]] = ...) -> None: ...

class CreateSessionRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("prompt", "without_special", "count_only", "with_names")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_SPECIAL_FIELD_NUMBER: _ClassVar[int]
    COUNT_ONLY_FIELD_NUMBER: _ClassVar[int]
    WITH_NAMES_FIELD_NUMBER: _ClassVar[int]
    prompt: GenerateRequest
    without_special: bool
    count_only: bool
    with_names: bool
    def __init__(self, prompt: _Optional[_Union[GenerateRequest, _Mapping]] = ..., without_special: _Optional[bool] = ..., count_only: _Optional[bool] = ..., with_names: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("count", "ids", "names", "context")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    count: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    context: int
    def __init__(self, count: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., names: _Optional[_Iterable[str]] = ..., context: _Optional[int] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    tokens: TokenIds
    def __init__(self, model: _Optional[str] = ..., tokens: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class KeepResponseRequest(_message.Message):
    __slots__ = ("id", "items")
    ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    id: str
    items: bytes
    def __init__(self, id: _Optional[str] = ..., items: _Optional[bytes] = ...) -> None: ...

class KeepResponseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FindResponseRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class FindResponseResponse(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: bytes
    def __init__(self, items: _Optional[bytes] = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Session(_message.Message):
    __slots__ = ("session_id", "model", "length", "digest", "generation", "running", "reason", "answer_position", "epoch", "verifier", "drafters")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ANSWER_POSITION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    model: str
    length: int
    digest: int
    generation: int
    running: bool
    reason: _types_pb2.FinishReason
    answer_position: int
    epoch: int
    verifier: str
    drafters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_id: _Optional[str] = ..., model: _Optional[str] = ..., length: _Optional[int] = ..., digest: _Optional[int] = ..., generation: _Optional[int] = ..., running: _Optional[bool] = ..., reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., answer_position: _Optional[int] = ..., epoch: _Optional[int] = ..., verifier: _Optional[str] = ..., drafters: _Optional[_Iterable[str]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("session_id", "discard")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DISCARD_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    discard: bool
    def __init__(self, session_id: _Optional[str] = ..., discard: _Optional[bool] = ...) -> None: ...

class WatchSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class CheckKeyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckKeyResponse(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "context", "vocabulary", "tokenizer_digest", "verifiers", "drafters", "misfits", "adapters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    MISFITS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    context: int
    vocabulary: int
    tokenizer_digest: bytes
    verifiers: int
    drafters: int
    misfits: _containers.RepeatedScalarFieldContainer[str]
    adapters: _containers.RepeatedCompositeFieldContainer[ModelAdapter]
    def __init__(self, name: _Optional[str] = ..., context: _Optional[int] = ..., vocabulary: _Optional[int] = ..., tokenizer_digest: _Optional[bytes] = ..., verifiers: _Optional[int] = ..., drafters: _Optional[int] = ..., misfits: _Optional[_Iterable[str]] = ..., adapters: _Optional[_Iterable[_Union[ModelAdapter, _Mapping]]] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "folder", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    folder: str
    model: str
    def __init__(self, name: _Optional[str] = ..., folder: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class ModelAdapter(_message.Message):
    __slots__ = ("name", "model", "folder", "digest", "rank", "parameters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    folder: str
    digest: bytes
    rank: int
    parameters: int
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., folder: _Optional[str] = ..., digest: _Optional[bytes] = ..., rank: _Optional[int] = ..., parameters: _Optional[int] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
