"""The bodies of Anthropic's Messages API: /v1/messages and /v1/messages/count_tokens.

Fields that would change the answer, and are not served, are refused by name, as `schema` has it. `cache_control`,
wherever it is, has no effect: prompts that begin alike share their KV anyway.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from outrider.client import Options
from outrider.core.answers.formats import MAX_TOOLS
from outrider.gateway.apis.conversation import (
    ConversationForm,
    TypedPart,
    assistant_message,
    function_tool,
)
from outrider.gateway.schema import (
    MOST_MESSAGES,
    MOST_STOPS,
    UNSUPPORTED,
    Items,
    LenientBody,
    NoEffect,
    RequestBody,
    Unserved,
    made_call,
    only,
    text_parts,
)

KEPT_EDIT = "clear_thinking_"  # type of an edit of the context, which changes nothing if it keeps all thinking


class TextBlock(TypedPart):
    """A block of text, in a place for text alone."""

    NEEDS: ClassVar[Mapping[str, Sequence[str]]] = {"text": ("text",)}
    WHAT: ClassVar[str] = "a block"
    WHY: ClassVar[str] = "models here read text only"

    text: str | None = None


Texts = Annotated[Items[TextBlock], BeforeValidator(text_parts)]  # text, or blocks of it; after validation blocks


class ContentBlock(TextBlock):
    """A block of a message."""

    NEEDS: ClassVar[Mapping[str, Sequence[str]]] = {
        "text": ("text",),
        "thinking": ("thinking",),
        "redacted_thinking": (),  # ignored
        "tool_use": ("id", "name", "input"),
        "tool_result": ("tool_use_id",),
    }

    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Texts | None = None  # of a result

    @property
    def call(self) -> dict[str, Any]:
        """A tool_use in the form that chat templates take."""
        return made_call(self.id or "", self.name or "", json.dumps(self.input, ensure_ascii=False))


def _text(blocks: Sequence[TextBlock] | None) -> str:
    return "".join(block.text or "" for block in blocks or ())


_BLOCKS = {  # types of blocks, by the role of their message
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}


class TurnMessage(LenientBody):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Items[ContentBlock], BeforeValidator(text_parts)]

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> TurnMessage:
        wrong = next((it.type for it in self.content if it.type not in _BLOCKS[self.role]), None)
        if wrong is not None:
            raise ValueError(f"a message of role {self.role} has no block of type {wrong}")
        return self

    @property
    def for_template(self) -> Iterator[dict[str, Any]]:
        """The messages that chat templates take: results of calls are some of their own."""
        blocks = self.content
        if self.role == "assistant":
            reasoning = "".join(block.thinking or "" for block in blocks)
            yield assistant_message(
                _text(blocks), reasoning, [block.call for block in blocks if block.type == "tool_use"]
            )
            return
        texts: list[str] = []
        for block in blocks:
            if block.type == "text":
                texts.append(block.text or "")
                continue
            if texts:
                yield {"role": self.role, "content": "".join(texts)}
                texts = []
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
        if texts:
            yield {"role": self.role, "content": "".join(texts)}


class MessagesTool(TypedPart):
    """A function that the answer may call. Tools that Anthropic defines or runs are not served."""

    NEEDS: ClassVar[Mapping[str, Sequence[str]]] = {"custom": ("name", "input_schema")}
    WHAT: ClassVar[str] = "a tool"
    WHY: ClassVar[str] = "only functions with an input_schema are served; leave it out"

    type: str = "custom"
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: Unserved = only(False)
    allowed_callers: Unserved = only(["direct"])


class MessagesToolChoice(RequestBody):
    """Which calls the answer may or has to make."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _has_the_name_that_it_needs(self) -> MessagesToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name: is for the type tool, which needs it")
        return self

    @property
    def for_sdk(self) -> Any:
        """The choice as the SDK takes it."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return {"any": "required"}.get(self.type, self.type)


class ThinkingConfig(RequestBody):
    """Whether the model is to reason, where its chat template has a switch for that (`enable_thinking`)."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None  # no bound of its own: max_tokens bounds reasoning and answer together
    display: Literal["summarized", "omitted"] | None = None


class AnswerSchema(RequestBody):
    """The form of an answer: JSON of a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestBody):
    """The form of an answer, and the effort for it."""

    effort: str | None = None  # an input of the chat template, `reasoning_effort`
    format: AnswerSchema | None = None
    task_budget: Unserved = None


class ContextEdit(LenientBody):
    """An edit of the conversation before the model reads it: one that leaves it as it is."""

    type: str
    keep: Any = None

    @model_validator(mode="after")
    def _changes_nothing(self) -> ContextEdit:
        if not self.type.startswith(KEPT_EDIT) or self.keep not in ("all", {"type": "all"}):
            raise PydanticCustomError(
                UNSUPPORTED, f"has an edit of type {self.type[:64]!r}: what is sent is read as it is; leave it out"
            )
        return self


class ContextManagement(RequestBody):
    """Edits of the conversation."""

    edits: Items[ContextEdit] = Field(default_factory=list)


class CountBody(ConversationForm):
    """The body of /v1/messages/count_tokens."""

    # text only, up to 4,096; thinking is taken back as reasoning
    messages: list[TurnMessage] = Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    system: Texts = Field(default_factory=list)  # text, or blocks of text
    # functions, up to 128
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: MessagesToolChoice | None = None  # see [tools](#tools)
    thinking: ThinkingConfig | None = None  # `enabled` and `disabled` are the template's `enable_thinking`
    output_config: OutputConfig | None = None  # `format`, `effort`
    output_format: AnswerSchema | None = None  # older name of `output_config.format`
    context_management: ContextManagement | None = None  # edits that keep all are taken
    betas: NoEffect = None
    cache_control: NoEffect = None
    diagnostics: NoEffect = None
    inference_geo: NoEffect = None
    metadata: NoEffect = None
    service_tier: NoEffect = None
    user_profile_id: NoEffect = None
    workspace_id: NoEffect = None
    billing_policy: NoEffect = None
    fallback_credit_token: NoEffect = None
    speed: NoEffect = None
    compaction: Unserved = None
    container: Unserved = None
    fallbacks: Unserved = only([])
    mcp_servers: Unserved = only([])
    thread: Unserved = None

    @property
    def token_limit(self) -> int | None:
        return None

    @property
    def names(self) -> Mapping[str, str]:
        schema = "output_format" if self.output_format is not None else "output_config"
        variables = "output_config" if self.thinking is None else "thinking"
        return {
            "prompt": "messages",
            "schema": schema,
            "grammar": schema,
            "template_variables": variables,
            "stop": "stop_sequences",
            "messages": "messages",
            "tools": "tools",
        }

    @property
    def schemas(self) -> list[Any]:
        forced = self.tool_choice is not None and self.tool_choice.type in ("any", "tool")
        wanted = [] if self._form is None else [self._form.schema_]
        return [*wanted, *(tool.input_schema for tool in self.tools or () if forced)]

    @property
    def given(self) -> dict[str, Any]:
        choice = self.tool_choice
        parallel = None if choice is None else choice.disable_parallel_tool_use
        effort = None if self.output_config is None else self.output_config.effort
        variables = {} if effort is None else {"reasoning_effort": effort}
        if self.thinking is not None and self.thinking.type != "adaptive":
            variables["enable_thinking"] = self.thinking.type == "enabled"  # type: ignore[assignment]
        return {
            "messages": [*self._messages()],
            "tools": self.tools
            and [function_tool(it.name or "", it.description, it.input_schema) for it in self.tools],
            "tool_choice": None if choice is None else choice.for_sdk,
            "parallel_tool_calls": None if parallel is None else not parallel,
            "template_variables": variables or None,
            "schema": None if self._form is None else self._form.schema_,
        }

    def prompt_options(self) -> Options:
        """Return the SDK's keywords for the prompt alone."""
        given = self.given
        kept = {name: given[name] for name in ("messages", "tools", "template_variables") if given[name] is not None}
        if given["tool_choice"] == "none":
            kept.pop("tools", None)
        return {"model": self.model, **kept}  # type: ignore[typeddict-item]

    @property
    def _form(self) -> AnswerSchema | None:
        return self.output_format or (None if self.output_config is None else self.output_config.format)

    def _messages(self) -> Iterator[dict[str, Any]]:
        if system := _text(self.system):
            yield {"role": "system", "content": system}
        for message in self.messages:
            yield from message.for_template

    @model_validator(mode="after")
    def _fits_together(self) -> CountBody:
        if self.messages[-1].role == "assistant":
            raise ValueError("messages: end with one of the assistant; an answer that continues it is not served")
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise ValueError("output_format: is the older name of output_config.format; give one of them")
        return self


class MessagesBody(CountBody):
    """The body of /v1/messages."""

    max_tokens: int = Field(ge=1)
    # up to 16 strings
    stop_sequences: Annotated[list[str], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None  # 0: all

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def given(self) -> dict[str, Any]:
        return {**super().given, "top_k": self.top_k, "stop": self.stop_sequences or None}
