"""The bodies of /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, model_validator

from outrider.client import Options, TokenizedPrompt
from outrider.gateway.schema import (
    MOST_MESSAGES,
    ChatMessage,
    Items,
    NoEffect,
    RequestBody,
    TemplateInputs,
    Unserved,
    only,
)
from outrider.gateway.serialize import Json


class TokenizeBody(TemplateInputs):
    """A prompt, or messages with their tools."""

    model: str = ""
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    add_special_tokens: bool | None = None  # of a prompt: true, if left out
    return_token_strs: bool = False
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

    @property
    def names(self) -> Mapping[str, str]:
        """The fields of this request, by the SDK's names for them, where these differ."""
        return {"template_variables": "chat_template_kwargs"}

    def options(self) -> Options:
        """Return the SDK's keywords for this request."""
        options: Options = {"model": self.model, **self.template_options()}
        if self.messages is not None:
            options["messages"] = [message.for_template for message in self.messages]
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
