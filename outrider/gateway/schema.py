"""The bodies of OpenAI's requests, as far as a text model can serve them, and the SDK options that they stand for.

Fields of OpenAI, and those that vLLM, SGLang and llama.cpp add to them. One that would change the answer, and is not
served, is refused by name, never ignored: a wrong answer is worse than none. A value of such a field that changes
nothing is taken, because client programs send them always, and so is a field that only labels a request (`user`,
`metadata`, `store`, ...). Unknown keys of messages are ignored. docs/gateway.md has a table of all fields.

A list is refused at its first malformed item, and an object at its first unknown field. What remains of a body after it
was parsed is the fields that are used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from outrider.client import Options
from outrider.core.answers.formats import MAX_TOOLS
from outrider.core.answers.schemas import followable
from outrider.core.json_bounds import check_json
from outrider.core.session.contract import MAX_LISTED, PolicyName, Priority, RuleName
from outrider.errors import InvalidRequest
from outrider.gateway.multiplex import Prompt

MOST_CHOICES = 128  # of all prompts of a request
MOST_MESSAGES = 4096
MOST_STOPS = 16
UNSUPPORTED = "unsupported"  # pydantic's name for the error of a field that is not served
TEXT_PARTS = ("text", "refusal", "input_text", "output_text")
AS_MANY_AS_FIT = -1  # limit on new tokens, as llama.cpp has it
OWN = ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos")  # fields that `outrider` has, too
COMPLETION_TOKENS = 16  # OpenAI's default limit on the new tokens of a completion


def _refuse(value: object) -> None:
    raise PydanticCustomError(UNSUPPORTED, "is not served here; leave it out")


def _forget(value: object) -> None:
    return None


def _short(value: object) -> object:
    """Check the length of an object before pydantic looks at each of its entries."""
    if isinstance(value, dict) and len(value) > MAX_LISTED:
        raise PydanticCustomError("too_long", f"must have at most {MAX_LISTED} entries")
    return value


def _limit(value: int) -> int:
    if value < 1 and value != AS_MANY_AS_FIT:
        raise ValueError("must be at least 1")
    return value


def only(*values: Any) -> Any:
    """Return the default of a field that is not served, with its values that change nothing of an answer."""
    return Field(default=None, json_schema_extra={"neutral": [*values]})


ItemT = TypeVar("ItemT")
Items = Annotated[list[ItemT], Field(fail_fast=True)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenLimit = Annotated[int, AfterValidator(_limit)]
Unserved = Annotated[None, BeforeValidator(_refuse)]  # a field of OpenAI's that would change the answer
NoEffect = Annotated[None, BeforeValidator(_forget)]  # one that does not: its value is not kept


class RequestBody(BaseModel):
    """Base of all bodies. As in OpenAI's API, an unknown field is an error, and null is the same as no value."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _given_fields_and_first_unknown_one(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        neutral, quick = _neutral_values(cls)
        if quick and None not in values.values():  # of parts, of which a body may have thousands
            return values
        given = {
            name: value
            for name, value in values.items()
            if value is not None and name in neutral and (not neutral[name] or value not in neutral[name])
        }
        if cls.model_config["extra"] == "ignore":
            return given
        unknown = next((name for name in values if values[name] is not None and name not in neutral), None)
        return given if unknown is None else {**given, unknown: values[unknown]}


@cache
def _neutral_values(kind: type[BaseModel]) -> tuple[Mapping[str, Sequence[Any]], bool]:
    """Return the fields of a body by their keys in JSON, each with the values that change nothing, besides null; and
    whether there are none of these, and unknown keys are ignored."""
    extras = {field.alias or name: field.json_schema_extra for name, field in kind.model_fields.items()}
    neutral: dict[str, Any] = {
        name: extra["neutral"] if isinstance(extra, dict) else () for name, extra in extras.items()
    }
    return neutral, kind.model_config["extra"] == "ignore" and not any(neutral.values())


class LenientBody(RequestBody):
    """Base of parts whose unknown keys are ignored: other programs put what they like into messages."""

    model_config = ConfigDict(extra="ignore")


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


class StructuredOutputs(RequestBody):
    """What an answer has to be, as vLLM has it."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=MAX_LISTED, fail_fast=True)] | None = None
    grammar: str | None = None
    structural_tag: Unserved = None
    whitespace_pattern: Unserved = None
    disable_fallback: NoEffect = None
    disable_any_whitespace: Unserved = only(False)
    disable_additional_properties: NoEffect = None  # there are none


class StreamOptions(LenientBody):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # each chunk has the usage so far, as vLLM has it
    include_obfuscation: bool = False  # accepted, and has no effect


class AnswerForm(NamedTuple):
    """What an answer has to be, by a field of its request."""

    option: str  # of the SDK
    field: str
    value: Any


class ResponseTerms(NamedTuple):
    """What a request asks for of its answers, beside their texts."""

    model: str
    n: int  # answers of each prompt
    stream: bool
    include_usage: bool  # a stream ends with the usage
    continuous_usage: bool  # each of its events has the usage so far
    alternatives: int | None  # as `GenerationForm.alternatives`
    token_limit: int | None  # as `GenerationForm.token_limit`
    names: Mapping[str, str]  # the request's fields, by the SDK's names for them
    not_enforced: Sequence[str] = ()  # what an answer may break of the request's schemas: JSON pointers
    echo: bool = False  # answers begin with their prompts
    prompt_logprobs: int | None = None  # as `GenerationForm.prompt_logprobs`
    prompt_alternatives: int | None = None  # as `GenerationForm.prompt_alternatives`
    prompt_limits: Sequence[int | None] = ()  # most tokens of each prompt; None: as many as fit into the context
    token_ids: bool = False  # the ids of prompts and answers are wanted
    tokens_as_ids: bool = False  # tokens with log-probabilities are written as their ids


class AnswerRequest(RequestBody):
    """A request for answers, by the API of its caller."""

    model: str  # as `/v1/models` lists it
    temperature: float | None = Field(default=None, ge=0, le=2)  # 0 to 2
    top_p: float | None = Field(default=None, gt=0, le=1)  # above 0
    seed: int | None = None  # the text is then certain; OpenAI only tries for that, in chats and completions alone
    stream: bool = False
    outrider: Outrider = Outrider()  # see above

    @property
    def prompts(self) -> Sequence[Prompt]:
        """One or several prompts, as text or token ids; None: the messages."""
        return [None]

    def following(self, kept: bytes) -> Self:
        """Return the request behind the conversation that it continues, which is empty but for responses."""
        return self

    @property
    def terms(self) -> ResponseTerms:
        """What is asked for of the answers."""
        raise NotImplementedError

    @property
    def names(self) -> Mapping[str, str]:
        """The fields of this request, by the SDK's names for them, where these differ."""
        raise NotImplementedError

    @property
    def token_limit(self) -> int | None:
        """Limit on the new tokens of each answer; None: as many as fit into the context."""
        raise NotImplementedError

    @property
    def schemas(self) -> list[Any]:
        """The schemas that parts of the answer have to follow."""
        raise NotImplementedError

    @property
    def given(self) -> dict[str, Any]:
        """The SDK's keywords for what the APIs do not share; None is no value."""
        raise NotImplementedError

    def options(self) -> Options:
        """Return the SDK's keywords for this request."""
        options = {
            "model": self.model,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": None if self.seed is None else self.seed % 2**64,
            **self.given,
            **self.outrider.model_dump(exclude_none=True),
        }
        given = {name: value for name, value in options.items() if value is not None}
        return {**given, "max_tokens": self.token_limit}  # type: ignore[typeddict-item]

    @model_validator(mode="after")
    def _has_nothing_twice(self) -> Self:
        """Raise ValueError for a field that the body and its `outrider` both have."""
        own = (name for name in OWN if None not in (getattr(self, name, None), getattr(self.outrider, name)))
        if (both := next(own, None)) is not None:
            raise ValueError(f"{both}: is in outrider, too; give one of them")
        return self


class GenerationForm(AnswerRequest):
    """The fields that completions and chats share."""

    n: int = Field(default=1, ge=1, le=MOST_CHOICES)  # up to 128, which share a seed; the prompt is read once
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # -100 to 100, by token id, up to 4,096
    logit_bias: Annotated[
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], float] | None, BeforeValidator(_short)
    ] = None
    # up to 16 strings
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    stream_options: StreamOptions | None = None  # `include_usage`, `continuous_usage_stats`
    user: NoEffect = None
    request_id: NoEffect = None
    cache_prompt: NoEffect = None
    guided_json: dict[str, Any] | str | None = None  # a schema, as older versions of vLLM have it
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(max_length=MAX_LISTED, fail_fast=True)] | None = None
    guided_grammar: str | None = None  # in Lark's form
    structured_outputs: StructuredOutputs | None = None  # as vLLM: `json`, `json_object`, `regex`, `choice`, `grammar`
    top_k: Annotated[int, Field(ge=-1)] | None = None  # -1 and 0: all
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0)] | None = None  # llama.cpp's name of `repetition_penalty`
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[tuple[int, ...], Field(max_length=MAX_LISTED, fail_fast=True)] | None = None
    priority: int | None = None  # above 0: the request can wait where all places are taken
    use_beam_search: Unserved = only(False)
    length_penalty: Unserved = only(1)
    early_stopping: Unserved = only(False)
    include_stop_str_in_output: bool | None = None  # also the text of a stop id
    skip_special_tokens: bool | None = None  # false: they have text, but for one that ends the answer
    spaces_between_special_tokens: Unserved = only(True)
    detokenize: Unserved = only(True)
    return_token_ids: bool = False  # `prompt_token_ids` and `token_ids`, as vLLM has them
    return_tokens_as_token_ids: bool = False  # tokens with log-probabilities are written `token_id:N`
    # of every token of the prompt, up to 20 and not streamed, as vLLM has them
    prompt_logprobs: int | None = Field(default=None, ge=0, le=20)
    # the last ones alone, at most this many; -1: as many as leave room for the answer
    truncate_prompt_tokens: TokenLimit | None = None
    allowed_token_ids: Unserved = None
    bad_words: Unserved = only([])
    logits_processors: Unserved = only([])
    typical_p: Unserved = only(1)
    mirostat: Unserved = only(0)
    dynatemp_range: Unserved = only(0)
    dry_multiplier: Unserved = only(0)
    xtc_probability: Unserved = only(0)

    @property
    def token_field(self) -> str:
        """The name of the field that limits the new tokens."""
        return "max_tokens"

    @property
    def terms(self) -> ResponseTerms:
        """What is asked for of the answers."""
        shown = self.stream_options or StreamOptions()
        return ResponseTerms(
            self.model,
            self.n,
            self.stream,
            shown.include_usage,
            shown.continuous_usage_stats,
            self.alternatives,
            self.token_limit,
            self.names,
            not_enforced(self.schemas),
            prompt_logprobs=self.prompt_logprobs,
            prompt_alternatives=self.prompt_alternatives,
            prompt_limits=[_most_tokens(prompt) for prompt in self.prompts],
            token_ids=self.return_token_ids,
            tokens_as_ids=self.return_tokens_as_token_ids,
        )

    @property
    def alternatives(self) -> int | None:
        """Number of likeliest tokens whose log-probabilities are wanted; None: no log-probabilities at all."""
        raise NotImplementedError

    @property
    def prompt_alternatives(self) -> int | None:
        """Number of likeliest tokens whose log-probabilities are computed for each token of the prompt; None: none."""
        return self.prompt_logprobs

    @cached_property
    def forms(self) -> list[AnswerForm]:
        """What the answer has to be."""
        given = self.structured_outputs or StructuredOutputs()
        json_ = {"type": "object"} if given.json_ is None and given.json_object else given.json_
        forms = (
            AnswerForm("schema", "guided_json", _parsed("guided_json", self.guided_json)),
            AnswerForm("schema", "structured_outputs", _parsed("structured_outputs", json_)),
            AnswerForm("regex", "guided_regex", self.guided_regex),
            AnswerForm("regex", "structured_outputs", given.regex),
            AnswerForm("choices", "guided_choice", self.guided_choice),
            AnswerForm("choices", "structured_outputs", given.choice),
            AnswerForm("grammar", "guided_grammar", self.guided_grammar),
            AnswerForm("grammar", "structured_outputs", given.grammar),
        )
        return [form for form in forms if form.value is not None]

    @property
    def schemas(self) -> list[Any]:
        """The schemas that parts of the answer have to follow."""
        return [form.value for form in self.forms if form.option == "schema"]

    @property
    def names(self) -> dict[str, str]:
        """The fields of this request, by the SDK's names for them, where these differ."""
        forms = self.forms
        names = {form.option: form.field for form in forms} | {"grammar": forms[0].field if forms else "grammar"}
        names["max_tokens"] = self.token_field
        if self.stop_token_ids is not None:
            names["stop_ids"] = "stop_token_ids"
        if self.repeat_penalty is not None:
            names["repetition_penalty"] = "repeat_penalty"
        return names

    @model_validator(mode="after")
    def _one_field_for_each_thing(self) -> GenerationForm:
        if len(forms := self.forms) > 1:
            raise ValueError(f"{forms[1].field}: does not go with {forms[0].field}: an answer has one of them")
        if self.repeat_penalty is not None and self.repetition_penalty is not None:
            raise ValueError("repeat_penalty: is another name of repetition_penalty; give one of them")
        return self

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationForm:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: is for streams; set stream to true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs: are not streamed; set stream to false")
        return self

    @property
    def given(self) -> dict[str, Any]:
        penalty = self.repetition_penalty if self.repetition_penalty is not None else self.repeat_penalty
        return {
            "top_k": self.top_k and max(0, self.top_k),
            "min_p": self.min_p,
            "repetition_penalty": penalty,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "stop_ids": self.stop_token_ids,
            "priority": "batch" if self.priority is not None and self.priority > 0 else None,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias and {int(token): bias for token, bias in self.logit_bias.items()},
            "stop": self.stop,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "skip_special_tokens": self.skip_special_tokens,
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
            "return_prompt_token_ids": self.return_token_ids or None,
            "logprobs": self.alternatives,
            "prompt_logprobs": self.prompt_alternatives,
            **{form.option: form.value for form in self.forms},
        }


def _most_tokens(prompt: Prompt) -> int | None:
    """Return the most tokens that a prompt may have, special ones excepted; None: it is not known."""
    return None if prompt is None else len(prompt.encode(errors="replace")) if isinstance(prompt, str) else len(prompt)


def not_enforced(schemas: Sequence[Any]) -> list[str]:
    """Return what answers may break of schemas, as JSON pointers."""
    return [pointer for schema in schemas for pointer in _ignored(schema)]


def _ignored(schema: Any) -> list[str]:
    try:
        return followable(schema).ignored
    except ValueError:  # the router refuses it
        return []


def _parsed(field: str, schema: dict[str, Any] | str | None) -> dict[str, Any] | None:
    if not isinstance(schema, str):
        return schema
    check_json(field, schema)
    try:
        parsed = json.loads(schema)
    except ValueError as error:
        raise InvalidRequest(field, f"is no JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise InvalidRequest(field, "must be a JSON schema, as an object or as a string of one")
    return parsed


class Completion(GenerationForm):
    """The body of /v1/completions."""

    prompt: str | Items[int] | Items[str] | Items[Items[int]]  # text, token ids, or several; at most 128 answers in all
    # of completions 16 if left out; -1: as many as fit; 0: none, for `echo` or `prompt_logprobs`
    max_tokens: int = Field(default=COMPLETION_TOKENS, ge=-1)
    logprobs: int | None = Field(default=None, ge=0, le=20)  # of completions up to 20
    echo: bool = False  # the text begins with the prompt's, and `logprobs` with those of its tokens
    suffix: Unserved = only("")
    add_special_tokens: bool | None = None  # those that the tokenizer itself puts around a prompt of text
    best_of: int | None = None  # must be `n`: answers are not ranked

    @property
    def prompts(self) -> Sequence[Prompt]:
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return [*self.prompt]

    @property
    def token_limit(self) -> int | None:
        return None if self.max_tokens < 0 else self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompt_alternatives(self) -> int | None:
        wanted = self.prompt_logprobs
        return max(self.logprobs or 0, wanted or 0) if self.echo else wanted

    @property
    def terms(self) -> ResponseTerms:
        return super().terms._replace(echo=self.echo)

    def options(self) -> Options:
        """Return the SDK's keywords for this request; without an answer, for one of a single token."""
        given: Options = {} if self.add_special_tokens is None else {"add_special_tokens": self.add_special_tokens}
        return {**super().options(), **given, "max_tokens": self.token_limit if self.token_limit != 0 else 1}

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


class ContentPart(LenientBody):
    """A part of a message: text, or what a model has refused to say."""

    type: str
    text: str = ""
    refusal: str = ""

    @model_validator(mode="after")
    def _is_text(self) -> ContentPart:
        if self.type not in TEXT_PARTS:
            raise PydanticCustomError(UNSUPPORTED, f"has a part of type {self.type!r}: models here read text only")
        if not {"text", "refusal"} & self.model_fields_set:
            raise ValueError("a part of type text needs text")
        return self


def _text(content: str | Sequence[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text or part.refusal for part in content)


class CalledFunction(LenientBody):
    """The function of a call, with its arguments."""

    name: str
    arguments: Annotated[str, BeforeValidator(lambda value: json.dumps(value) if isinstance(value, dict) else value)]


def made_call(id_: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call in the form that chat templates take; `arguments`: JSON."""
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def text_parts(content: object) -> object:
    """Return content as a list of parts; a text is one part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class MadeCall(LenientBody):
    """A call that the assistant has made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def for_template(self) -> dict[str, Any]:
        """The call in the form that chat templates take. (pydantic's own dump takes ten times as long.)"""
        return made_call(self.id, self.function.name, self.function.arguments)


class ChatMessage(LenientBody):
    """One message of a conversation. What an answer has beside its text is taken back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | Items[ContentPart], AfterValidator(_text)] = ""  # always a string after validation
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of it
    refusal: str | None = None
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
        if "content" not in self.model_fields_set and self.role != "assistant":
            raise ValueError("content: is missing")
        return self

    @property
    def for_template(self) -> dict[str, Any]:
        """The message in the form that chat templates take. The role developer becomes system."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.content or self.refusal or ""}
        given: dict[str, Any] = {
            "reasoning_content": self.reasoning_content or self.reasoning,
            "tool_calls": self.tool_calls and [call.for_template for call in self.tool_calls],
            "tool_call_id": self.tool_call_id,
        }
        return message | {name: value for name, value in given.items() if value is not None}


class FunctionName(RequestBody):
    """A function by its name."""

    name: str


class FunctionTool(LenientBody):
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
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")  # of json_object, as llama.cpp has it

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema: is for the type json_schema, which needs it")
        if self.schema_ is not None and self.type != "json_object":
            raise ValueError("schema: is for the type json_object")
        return self

    @property
    def schema(self) -> dict[str, Any] | None:  # type: ignore[override]
        """The schema of the answer; None: it is any text."""
        if self.json_schema is None:
            return (self.schema_ or {"type": "object"}) if self.type == "json_object" else None
        return self.json_schema.schema_ or {"type": "object"}


class TemplateInputs(RequestBody):
    """What a chat template gets beside the messages, and which template that is."""

    # functions, up to 128
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    # instead of the model's own, in Jinja's language, up to 65,536 characters
    chat_template: Annotated[str, Field(min_length=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # further inputs of the chat template
    # whether the answer continues the last message, the assistant's: not by default, as in vLLM
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None  # as in vLLM: true, unless the last message is continued

    def template_options(self) -> Options:
        """Return the SDK's keywords for these fields."""
        options: Options = {}
        if self.tools:
            options["tools"] = [tool.model_dump() for tool in self.tools]
        if self.chat_template_kwargs:
            options["template_variables"] = self.chat_template_kwargs
        for name in ("chat_template", "continue_final_message", "add_generation_prompt"):
            if (value := getattr(self, name)) is not None:
                options[name] = value
        return options


class Chat(GenerationForm, TemplateInputs):
    """The body of /v1/chat/completions."""

    # text only, up to 4,096; `developer` is `system`; what an answer had beside its text is taken back
    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    max_tokens: TokenLimit | None = None  # of chats the older name of `max_completion_tokens`
    max_completion_tokens: TokenLimit | None = None  # left out, or -1: as many as fit into the context
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)  # up to 20, with `logprobs`
    response_format: ResponseFormat | None = None  # `text`, `json_object`, `json_schema`, with or without `strict`
    modalities: Items[Literal["text"]] | None = None  # must be `["text"]`
    metadata: NoEffect = None
    # `none`, `auto`, `required`, or a function by name: see [tools](#tools)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None  # whether an answer that has to make calls may make several
    prediction: NoEffect = None  # drafters do that
    prompt_cache_key: NoEffect = None  # prompts that begin alike share their KV anyway
    prompt_cache_options: NoEffect = None
    prompt_cache_retention: NoEffect = None
    safety_identifier: NoEffect = None
    service_tier: NoEffect = None
    store: NoEffect = None
    reasoning_effort: str | None = None  # an input of the chat template, but for `none`
    audio: Unserved = None
    function_call: Unserved = only("none")
    functions: Unserved = only([])
    moderation: Unserved = None
    verbosity: Unserved = only("medium")
    web_search_options: Unserved = None
    add_special_tokens: Unserved = only(False)
    documents: Unserved = only([])
    mm_processor_kwargs: Unserved = only({})
    separate_reasoning: Unserved = only(True)
    stream_reasoning: Unserved = only(True)

    @property
    def token_field(self) -> str:
        return "max_tokens" if self.max_tokens is not None else "max_completion_tokens"

    @cached_property
    def forms(self) -> list[AnswerForm]:
        wanted = None if self.response_format is None else self.response_format.schema
        return super().forms if wanted is None else [*super().forms, AnswerForm("schema", "response_format", wanted)]

    def options(self) -> Options:
        """Return the SDK's keywords for this request, its messages included."""
        options: Options = {**super().options(), **self.template_options()}
        options["messages"] = [message.for_template for message in self.messages]
        if self.reasoning_effort not in (None, "none"):
            effort = {"reasoning_effort": self.reasoning_effort}
            options["template_variables"] = effort | (self.chat_template_kwargs or {})
        if self.tool_choice is not None:
            choice = self.tool_choice
            options["tool_choice"] = choice if isinstance(choice, str) else choice.model_dump()
        if self.parallel_tool_calls is not None:
            options["parallel_tool_calls"] = self.parallel_tool_calls
        return options

    @property
    def token_limit(self) -> int | None:
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return None if limit == AS_MANY_AS_FIT else limit

    @property
    def schemas(self) -> list[Any]:
        own = super().schemas
        followed = self.tool_choice != "none" and (bool(own) or self.tool_choice not in (None, "auto"))
        return [*own, *(tool.function.get("parameters") for tool in self.tools or () if followed)]

    @property
    def names(self) -> dict[str, str]:
        variables = "chat_template_kwargs" if self.chat_template_kwargs else "reasoning_effort"
        return super().names | {"prompt": "messages", "template_variables": variables}

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _fits_together(self) -> Chat:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens: is the older name of max_completion_tokens; give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs to be true")
        return self
