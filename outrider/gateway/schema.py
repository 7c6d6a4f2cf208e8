"""The bodies of OpenAI's requests, as far as a text model can serve them, and the SDK options that they stand for.

A field whose effect this cluster cannot provide is refused by name, never ignored: a wrong answer is worse than none.
Fields that only label a request (`user`, `metadata`, `store`, ...) are accepted and have no effect. docs/gateway.md has
a table of all fields.

A list is refused at its first malformed item, and an object at its first unknown field. What remains of a body after it
was parsed is the fields that are used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from outrider.client import Options
from outrider.core.answers.formats import MAX_TOOLS
from outrider.core.json_bounds import check_json
from outrider.core.session.contract import MAX_LISTED, PolicyName, Priority, RuleName
from outrider.errors import InvalidRequest
from outrider.gateway.multiplex import Prompt

MOST_CHOICES = 128  # of all prompts of a request
MOST_MESSAGES = 4096
MOST_STOPS = 16
UNSUPPORTED = "unsupported"  # pydantic's name for the error of a field that is not served
COMPLETION_TOKENS = 16  # OpenAI's default limit on the new tokens of a completion


def _refuse(value: object) -> None:
    raise PydanticCustomError(UNSUPPORTED, "is not served here; leave it out")


def _short(value: object) -> object:
    """Check the length of an object before pydantic looks at each of its entries."""
    if isinstance(value, dict) and len(value) > MAX_LISTED:
        raise PydanticCustomError("too_long", f"must have at most {MAX_LISTED} entries")
    return value


ItemT = TypeVar("ItemT")
Items = Annotated[list[ItemT], Field(fail_fast=True)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Unserved = Annotated[None, BeforeValidator(_refuse)]  # a field of OpenAI's that would change the answer
NoEffect = Annotated[None, BeforeValidator(lambda value: None)]  # one that does not: its value is not kept


class RequestBody(BaseModel):
    """Base of all bodies. As in OpenAI's API, an unknown field is an error, and null is the same as no value."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_fields_and_first_unknown_one(cls, values: Any) -> Any:
        if not isinstance(values, dict) or (values.keys() <= cls.model_fields.keys() and None not in values.values()):
            return values
        given = {name: values[name] for name in cls.model_fields if values.get(name) is not None}
        unknown = next((name for name, value in values.items() if value is not None and name not in given), None)
        return given if unknown is None else {**given, unknown: values[unknown]}


class Outrider(RequestBody):
    """The fields that this cluster adds to OpenAI's, as `extra_body={"outrider": {...}}`."""

    speculation: PolicyName | None = None  # changes the speed, never the text
    depth: int | None = None  # ceiling on gamma
    rule: RuleName | None = None  # acceptance rule
    priority: Priority | None = None
    session: str | None = None  # the session to continue with a turn
    whole_history: bool | None = None  # the prompt is the whole conversation
    idempotency_key: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_ids: Annotated[tuple[int, ...], Field(max_length=MAX_LISTED, fail_fast=True)] | None = None
    ignore_eos: bool | None = None


class StreamOptions(RequestBody):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False  # accepted, and has no effect


class ResponseTerms(NamedTuple):
    """What a request asks for of its answers, beside their texts."""

    model: str
    n: int  # answers of each prompt
    stream: bool
    include_usage: bool  # a stream ends with the usage
    alternatives: int | None  # as `GenerationForm.alternatives`
    token_limit: int | None  # as `GenerationForm.token_limit`
    token_field: str  # the field that has it


class GenerationForm(RequestBody):
    """The fields that completions and chats share."""

    model: str
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[  # by token id
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], float] | None, BeforeValidator(_short)
    ] = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: NoEffect = None
    guided_json: dict[str, Any] | str | None = None  # these four as vLLM has them
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(max_length=MAX_LISTED, fail_fast=True)] | None = None
    guided_grammar: str | None = None
    outrider: Outrider = Outrider()

    @property
    def token_field(self) -> str:
        """The name of the field that limits the new tokens."""
        return "max_tokens"

    @property
    def prompts(self) -> Sequence[Prompt]:
        """One or several prompts, as text or token ids; None: the messages."""
        raise NotImplementedError

    @property
    def terms(self) -> ResponseTerms:
        """What is asked for of the answers."""
        include_usage = self.stream_options is not None and self.stream_options.include_usage
        return ResponseTerms(
            self.model, self.n, self.stream, include_usage, self.alternatives, self.token_limit, self.token_field
        )

    @property
    def token_limit(self) -> int | None:
        """Limit on the new tokens of each answer; None: as many as fit into the context."""
        raise NotImplementedError

    @property
    def alternatives(self) -> int | None:
        """Number of likeliest tokens whose log-probabilities are wanted; None: no log-probabilities at all."""
        raise NotImplementedError

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer, if it has one."""
        return _parsed(self.guided_json) if isinstance(self.guided_json, str) else self.guided_json

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationForm:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: is for streams; set stream to true")
        return self

    def options(self) -> Options:
        """Return the SDK's keywords for this request."""
        options: dict[str, Any] = {
            "model": self.model,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias and {int(token): bias for token, bias in self.logit_bias.items()},
            "seed": None if self.seed is None else self.seed % 2**64,
            "stop": self.stop,
            "logprobs": self.alternatives,
            "schema": self.answer_schema,
            "regex": self.guided_regex,
            "choices": self.guided_choice,
            "grammar": self.guided_grammar,
            **self.outrider.model_dump(),
        }
        given = {name: value for name, value in options.items() if value is not None}
        return {**given, "max_tokens": self.token_limit}  # type: ignore[typeddict-item]


def _parsed(schema: str) -> dict[str, Any]:
    check_json("guided_json", schema)
    try:
        parsed = json.loads(schema)
    except ValueError as error:
        raise InvalidRequest("guided_json", f"is no JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise InvalidRequest("guided_json", "must be a JSON schema, as an object or as a string of one")
    return parsed


class Completion(GenerationForm):
    """The body of /v1/completions."""

    prompt: str | Items[int] | Items[str] | Items[Items[int]]
    max_tokens: int = Field(default=COMPLETION_TOKENS, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: Literal[False] | None = None
    suffix: Unserved = None
    best_of: int | None = None

    @property
    def prompts(self) -> Sequence[Prompt]:
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return [*self.prompt]

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @model_validator(mode="after")
    def _best_is_all(self) -> Completion:
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError("best_of: must be the same as n; answers are not ranked here")
        return self

    @model_validator(mode="after")
    def _few_choices(self) -> Completion:
        if (answers := self.n * len(self.prompts)) > MOST_CHOICES:
            raise ValueError(f"prompt: is for {answers} answers, must be at most {MOST_CHOICES}")
        return self


class LoadAdapter(RequestBody):
    """The body of /v1/load_lora_adapter, as vLLM has it."""

    lora_name: str
    lora_path: str  # the adapter's folder, below the one in which the verifiers have theirs
    base_model_name: str = ""  # empty: the only model
    load_inplace: bool = False  # an adapter of that name is replaced in any case


class UnloadAdapter(RequestBody):
    """The body of /v1/unload_lora_adapter, as vLLM has it."""

    lora_name: str


class TextPart(RequestBody):
    """A part of a message."""

    type: Literal["text"]
    text: str


def _text(content: str | Sequence[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class CalledFunction(RequestBody):
    """The function of a call, with its arguments."""

    name: str
    arguments: str  # JSON


class MadeCall(RequestBody):
    """A call that the assistant has made."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: NoEffect = None  # of a streamed answer, which the caller sends back

    @property
    def for_template(self) -> dict[str, Any]:
        """The call in the form that chat templates take. (pydantic's own dump takes ten times as long.)"""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}


class ChatMessage(RequestBody):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | Items[TextPart], AfterValidator(_text)] = ""  # always a string after validation
    name: NoEffect = None
    refusal: Unserved = None  # it is null in an answer that the caller sends back as a part of the conversation
    tool_calls: Annotated[list[MadeCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    function_call: Unserved = None
    audio: Unserved = None

    @model_validator(mode="after")
    def _has_what_its_role_needs(self) -> ChatMessage:
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id: is for the role tool, which needs it")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls: are for the role assistant")
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise ValueError("content: is missing")
        return self

    @property
    def for_template(self) -> dict[str, Any]:
        """The message in the form that chat templates take. The role developer becomes system."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template for call in self.tool_calls]
        return message if self.tool_call_id is None else {**message, "tool_call_id": self.tool_call_id}


class FunctionName(RequestBody):
    """A function by its name."""

    name: str


class FunctionTool(RequestBody):
    """A function that the answer may call, as OpenAI describes it: the router checks it."""

    type: Literal["function"]
    function: dict[str, Any]


class ToolChoice(RequestBody):
    """The function that the answer has to call."""

    type: Literal["function"]
    function: FunctionName


class JsonSchema(RequestBody):
    """A schema with its name."""

    name: str
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    description: NoEffect = None
    strict: NoEffect = None  # the answer follows the schema in any case


class ResponseFormat(RequestBody):
    """The format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema: is for the type json_schema, which needs it")
        return self

    @property
    def schema(self) -> dict[str, Any] | None:  # type: ignore[override]
        """The schema of the answer; None: it is any text."""
        if self.json_schema is None:
            return {"type": "object"} if self.type == "json_object" else None
        return self.json_schema.schema_ or {"type": "object"}


class Chat(GenerationForm):
    """The body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    max_tokens: int | None = Field(default=None, ge=1)  # the older name of max_completion_tokens
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    modalities: Items[Literal["text"]] | None = None
    metadata: NoEffect = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # as vLLM and SGLang have it
    prediction: NoEffect = None  # only affects speed, and drafters provide that
    prompt_cache_key: NoEffect = None
    prompt_cache_options: NoEffect = None
    prompt_cache_retention: NoEffect = None
    safety_identifier: NoEffect = None
    service_tier: NoEffect = None
    store: NoEffect = None
    audio: Unserved = None
    function_call: Unserved = None
    functions: Unserved = None
    moderation: Unserved = None
    reasoning_effort: Unserved = None
    verbosity: Unserved = None
    web_search_options: Unserved = None

    @property
    def prompts(self) -> Sequence[Prompt]:
        return [None]

    @property
    def token_field(self) -> str:
        return "max_tokens" if self.max_tokens is not None else "max_completion_tokens"

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        wanted = None if self.response_format is None else self.response_format.schema
        return super().answer_schema if wanted is None else wanted

    def options(self) -> Options:
        """Return the SDK's keywords for this request, its messages included."""
        options: Options = {**super().options(), "messages": [message.for_template for message in self.messages]}
        if self.tools:
            options["tools"] = [tool.model_dump() for tool in self.tools]
        if self.chat_template_kwargs:
            options["template_variables"] = self.chat_template_kwargs
        if self.tool_choice is not None:
            choice = self.tool_choice
            options["tool_choice"] = choice if isinstance(choice, str) else choice.model_dump()
        if self.parallel_tool_calls is not None:
            options["parallel_tool_calls"] = self.parallel_tool_calls
        return options

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _fits_together(self) -> Chat:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens: is the older name of max_completion_tokens; give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs to be true")
        return self
