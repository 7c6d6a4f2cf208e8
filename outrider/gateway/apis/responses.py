"""The body of OpenAI's Responses API: /v1/responses.

Fields that would change the answer, and are not served, are refused by name, as `schema` has it.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError, model_validator

from outrider.core.answers.formats import MAX_TOOLS
from outrider.errors import InvalidRequest
from outrider.gateway.apis.conversation import (
    ConversationForm,
    TypedPart,
    assistant_message,
    function_tool,
)
from outrider.gateway.schema import (
    MOST_MESSAGES,
    Items,
    NoEffect,
    RequestBody,
    Unserved,
    made_call,
    only,
    text_parts,
)

ENCRYPTED = "reasoning.encrypted_content"  # value of `include`
LOGPROBS = "message.output_text.logprobs"  # value of `include` that is not served
OWN_REASONING = "outrider:"  # what the gateway's own `encrypted_content` begins with
MOST_METADATA = 16


class ItemPart(TypedPart):
    """A part of an item's content: text."""

    NEEDS: ClassVar[Mapping[str, Sequence[str]]] = {
        "text": ("text",),
        "input_text": ("text",),
        "output_text": ("text",),
        "refusal": ("refusal",),
        "reasoning_text": ("text",),
    }
    WHAT: ClassVar[str] = "a part"
    WHY: ClassVar[str] = "models here read text only"

    text: str | None = None
    refusal: str | None = None


def _text(content: Sequence[ItemPart] | None) -> str | None:
    return None if content is None else "".join(part.text or part.refusal or "" for part in content)


# text, or parts of it; after validation always a string, or None
Text = Annotated[Items[ItemPart] | None, BeforeValidator(text_parts), AfterValidator(_text)]


class InputItem(TypedPart):
    """An item of the conversation so far."""

    NEEDS: ClassVar[Mapping[str, Sequence[str]]] = {
        "message": ("role", "content"),
        "function_call": ("call_id", "name", "arguments"),
        "function_call_output": ("call_id", "output"),
        "reasoning": (),
    }
    WHAT: ClassVar[str] = "an item"
    WHY: ClassVar[str] = "there are messages, calls of functions with their outputs, and reasoning; leave it out"

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Text = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Text = None
    encrypted_content: str | None = None

    @property
    def reasoning(self) -> str:
        """The text of reasoning. Of another service's, which cannot be read, it is empty."""
        if self.content or not (self.encrypted_content or "").startswith(OWN_REASONING):
            return str(self.content or "")
        return read_reasoning(self.encrypted_content or "")

    @model_validator(mode="after")
    def _can_be_read(self) -> InputItem:
        try:
            _ = self.reasoning
        except (binascii.Error, UnicodeDecodeError):
            raise ValueError("encrypted_content: is not as the gateway has sent it") from None
        return self

    @property
    def is_system(self) -> bool:
        """Whether it is a system message, which OpenAI also names developer."""
        return self.type == "message" and self.role in ("system", "developer")


def write_reasoning(text: str) -> str:
    """Return the `encrypted_content` of reasoning. It is no secret: its text is in the answer, too."""
    return OWN_REASONING + base64.b64encode(text.encode()).decode()


def read_reasoning(content: str) -> str:
    """Return the text that `write_reasoning` has written. Raises binascii.Error and UnicodeDecodeError for others."""
    return base64.b64decode(content.removeprefix(OWN_REASONING), validate=True).decode()


class ResponsesTool(TypedPart):
    """A function that the answer may call. Tools that OpenAI defines or runs are not served."""

    NEEDS: ClassVar[Mapping[str, Sequence[str]]] = {"function": ("name",)}
    WHAT: ClassVar[str] = "a tool"
    WHY: ClassVar[str] = "only functions are served; leave it out"

    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Unserved = only(False)


class ResponsesToolChoice(TypedPart):
    """The function that the answer has to call."""

    NEEDS: ClassVar[Mapping[str, Sequence[str]]] = {"function": ("name",)}
    WHAT: ClassVar[str] = "a choice"
    WHY: ClassVar[str] = "there are none, auto, required, and a function by name"

    name: str | None = None


class TextFormat(RequestBody):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    description: NoEffect = None
    strict: NoEffect = None  # the answer follows the schema in any case

    @model_validator(mode="after")
    def _has_its_schema(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema: is for the type json_schema, which needs it")
        return self

    @property
    def wanted(self) -> dict[str, Any] | None:
        """The schema of the answer; None: it is any text."""
        return {"type": "object"} if self.type == "json_object" else self.schema_


class TextOptions(RequestBody):
    """What the text of an answer is to be."""

    format: TextFormat | None = None
    verbosity: Unserved = only("medium")


class ReasoningOptions(RequestBody):
    """How much the model is to reason."""

    effort: str | None = None  # an input of the chat template, but for `none`
    summary: NoEffect = None  # the answer has the whole reasoning
    generate_summary: NoEffect = None


def _items(given: object) -> object:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _few(given: object) -> object:
    """Check the number of entries before pydantic looks at each."""
    if isinstance(given, dict) and len(given) > MOST_METADATA:
        raise ValueError(f"must have at most {MOST_METADATA} entries")
    return given


class ResponsesBody(ConversationForm):
    """The body of /v1/responses."""

    # text only, up to 4,096 items: messages, calls of functions with their outputs, reasoning
    input: Annotated[
        list[InputItem],
        Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True),
        BeforeValidator(_items),
    ]
    instructions: str | None = None  # with the system messages at the beginning of `input` one system message
    max_output_tokens: int | None = Field(default=None, ge=1)  # left out: as many as fit into the context
    # functions, up to 128
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None  # see [tools](#tools)
    parallel_tool_calls: bool | None = None  # whether an answer that has to make calls may make several
    text: TextOptions | None = None  # `format`: `text`, `json_object`, `json_schema`
    reasoning: ReasoningOptions | None = None  # `effort`
    include: Items[str] | None = None  # `reasoning.encrypted_content`
    metadata: Annotated[dict[str, str], BeforeValidator(_few)] | None = None  # is in the response
    access_programs: NoEffect = None
    client_metadata: NoEffect = None
    max_tool_calls: NoEffect = None  # of tools that OpenAI runs
    prompt_cache_key: NoEffect = None
    prompt_cache_options: NoEffect = None
    prompt_cache_retention: NoEffect = None
    safety_identifier: NoEffect = None
    service_tier: NoEffect = None
    store: bool = True  # for a request that continues the response, for `session_ttl_s`; at most 1 MiB
    previous_response_id: str | None = None  # its items come before `input`
    stream_options: NoEffect = None
    user: NoEffect = None
    background: Unserved = only(False)
    background_options: Unserved = None
    context_management: Unserved = only([])
    conversation: Unserved = None
    image: Unserved = None
    moderation: Unserved = None
    prompt: Unserved = None
    top_logprobs: Unserved = only(0)
    truncation: Unserved = only("disabled")

    def following(self, kept: bytes) -> Self:
        """Return the request with the items of an earlier response before its own; `kept`: as `transcript` has them.

        Raises InvalidRequest for too many, and where `previous_response_id` was overlooked as it is not spelled out.
        """
        if self.previous_response_id is None:
            return self
        if not kept:
            raise InvalidRequest("previous_response_id", "must be spelled without escapes of JSON")
        try:
            items = [*_KEPT.validate_json(kept), *self.input]
        except ValidationError:
            raise InvalidRequest("previous_response_id", "is of another version; send the whole conversation") from None
        if len(items) > MOST_MESSAGES:
            problem = f"has {len(items)} items with the earlier ones, must have at most {MOST_MESSAGES}"
            raise InvalidRequest("input", problem)
        return self.model_copy(update={"input": items})

    @property
    def transcript(self) -> str:
        """The conversation's items, as JSON; empty if they are not to be kept."""
        items = ({name: value for name, value in item if value is not None} for item in self.input)
        return json.dumps([*items]) if self.store else ""

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def names(self) -> Mapping[str, str]:
        return {
            "max_tokens": "max_output_tokens",
            "prompt": "input",
            "messages": "input",
            "schema": "text",
            "grammar": "text",
            "template_variables": "reasoning",
            "tools": "tools",
        }

    @property
    def schemas(self) -> list[Any]:
        forced = self.tool_choice not in (None, "auto", "none")
        wanted = [] if self._wanted is None else [self._wanted]
        return [*wanted, *(tool.parameters for tool in self.tools or () if forced)]

    @property
    def given(self) -> dict[str, Any]:
        choice: Any = self.tool_choice
        if isinstance(choice, ResponsesToolChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        effort = None if self.reasoning is None else self.reasoning.effort
        return {
            "messages": [*self._messages()],
            "tools": self.tools and [function_tool(it.name or "", it.description, it.parameters) for it in self.tools],
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "template_variables": None if effort in (None, "none") else {"reasoning_effort": effort},
            "schema": self._wanted,
        }

    @property
    def echo(self) -> dict[str, Any]:
        """What a response repeats of its request."""
        choice = self.tool_choice
        form = None if self.text is None else self.text.format
        return {
            "model": self.model,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": None if self.reasoning is None else self.reasoning.effort, "summary": None},
            "store": self.store,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
            "tool_choice": choice.model_dump() if isinstance(choice, ResponsesToolChoice) else choice or "auto",
            "tools": [tool.model_dump(exclude={"defer_loading"}) for tool in self.tools or ()],
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": "disabled",
        }

    @property
    def _wanted(self) -> dict[str, Any] | None:
        return None if self.text is None or self.text.format is None else self.text.format.wanted

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that chat templates take."""
        items = self.input
        first = next((place for place, item in enumerate(items) if not item.is_system), len(items))
        if system := [text for text in (self.instructions, *(item.content for item in items[:first])) if text]:
            yield {"role": "system", "content": "\n\n".join(map(str, system))}
        turn = _AssistantTurn()
        for item in items[first:]:
            if not turn.takes(item):
                yield from turn.end()
                turn = _AssistantTurn()
            if turn.add(item):
                continue
            if item.type == "function_call_output":
                yield {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
            else:
                yield {"role": "system" if item.is_system else item.role, "content": item.content}
        yield from turn.end()

    @model_validator(mode="after")
    def _includes_what_is_served(self) -> ResponsesBody:
        if LOGPROBS in (self.include or ()):
            raise ValueError(f"include: has {LOGPROBS}, which is not served here; leave it out")
        return self


_KEPT = TypeAdapter(list[InputItem])


class _AssistantTurn:
    """Items that are one message of the assistant: reasoning, then text, then calls."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: str | None = None
        self._calls: list[Any] = []

    def takes(self, item: InputItem) -> bool:
        """Return whether an item can be a part of the message behind those that it has."""
        begun = self._content is not None or bool(self._calls)
        return item.type == "function_call" or (not begun and (item.type == "reasoning" or item.role == "assistant"))

    def add(self, item: InputItem) -> bool:
        """Add an item. Return whether it is one of the assistant."""
        match item.type:
            case "reasoning":
                self._reasoning.append(item.reasoning)
            case "function_call":
                self._calls.append(made_call(item.call_id or "", item.name or "", item.arguments or ""))
            case _ if item.role == "assistant":
                self._content = str(item.content)
            case _:
                return False
        return True

    def end(self) -> Iterator[dict[str, Any]]:
        """Yield the message, if there is one."""
        if self._content is not None or self._calls or any(self._reasoning):
            yield assistant_message(self._content or "", "".join(self._reasoning), self._calls)
