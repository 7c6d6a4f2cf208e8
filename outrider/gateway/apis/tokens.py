"""The bodies of /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from outrider.client import Options, TokenizedPrompt
from outrider.core.answers.formats import MAX_TOOLS
from outrider.gateway.schema import (
    MOST_MESSAGES,
    ChatMessage,
    FunctionTool,
    Items,
    NoEffect,
    RequestBody,
    Unserved,
    only,
)
from outrider.gateway.serialize import Json


class TokenizeBody(RequestBody):
    """A prompt, or messages with their tools."""

    model: str = ""
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None  # of a prompt: true, if left out
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None  # of messages, as of a chat
    continue_final_message: bool | None = None  # of messages, as of a chat
    chat_template: Unserved = None
    mm_processor_kwargs: Unserved = only({})
    cache_salt: NoEffect = None

    @model_validator(mode="after")
    def _has_one_prompt(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give prompt or messages, one of them")
        if self.messages is None and (self.tools or self.chat_template_kwargs):
            raise ValueError("prompt: tools and chat_template_kwargs are for messages")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens: is for a prompt; of messages the chat template writes them")
        return self

    def options(self) -> Options:
        """Return the SDK's keywords for this request."""
        options: Options = {"model": self.model}
        if self.messages is not None:
            options["messages"] = [message.for_template for message in self.messages]
        if self.tools:
            options["tools"] = [tool.model_dump() for tool in self.tools]
        if self.chat_template_kwargs:
            options["template_variables"] = self.chat_template_kwargs
        if self.add_generation_prompt is not None:
            options["add_generation_prompt"] = self.add_generation_prompt
        if self.continue_final_message is not None:
            options["continue_final_message"] = self.continue_final_message
        return options


class DetokenizeBody(RequestBody):
    """Tokens."""

    model: str = ""
    tokens: Items[int]


def tokenized(tokens: TokenizedPrompt, *, names: bool) -> Json:
    """Return the response of /tokenize; `names`: with the tokens' own."""
    return {
        "count": tokens.count,
        "max_model_len": tokens.context,
        "tokens": iter(tokens.ids),
        "token_strs": iter(tokens.names) if names else None,
    }
