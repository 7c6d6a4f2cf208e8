"""What the bodies of Anthropic's Messages and OpenAI's Responses share: each becomes the call that a chat becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from outrider.client import Options
from outrider.gateway.schema import (
    UNSUPPORTED,
    AnswerRequest,
    LenientBody,
    Outrider,
    ResponseTerms,
    check_own,
    not_enforced,
)


class TypedPart(LenientBody):
    """A part of a request with a type, and the fields that this type needs. A type that is not served is refused."""

    NEEDS: ClassVar[Mapping[str, Sequence[str]]] = {}  # the fields of each type
    WHAT: ClassVar[str] = ""  # what the part is
    WHY: ClassVar[str] = ""  # why others are not served

    type: str

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> TypedPart:
        if self.type not in self.NEEDS:
            raise PydanticCustomError(UNSUPPORTED, f"has {self.WHAT} of type {self.type[:64]!r}: {self.WHY}")
        missing = next((name for name in self.NEEDS[self.type] if getattr(self, name) is None), None)
        if missing is not None:
            raise ValueError(f"{self.WHAT} of type {self.type} needs {missing}")
        return self


class ConversationForm(AnswerRequest):
    """The fields that both share. There is one answer."""

    stream: bool = False
    temperature: float | None = Field(default=None, ge=0, le=2)  # 0 to 2
    top_p: float | None = Field(default=None, gt=0, le=1)  # above 0
    seed: int | None = None  # of neither API: the text is then certain
    outrider: Outrider = Outrider()  # see above

    @property
    def token_limit(self) -> int | None:
        """Limit on the new tokens of the answer; None: as many as fit into the context."""
        raise NotImplementedError

    @property
    def schemas(self) -> list[Any]:
        """The schemas that parts of the answer have to follow."""
        raise NotImplementedError

    @property
    def given(self) -> dict[str, Any]:
        """The SDK's keywords for what is the API's own; None is no value."""
        raise NotImplementedError

    @property
    def terms(self) -> ResponseTerms:
        """What is asked for of the answer."""
        return ResponseTerms(
            self.model, 1, self.stream, False, False, None, self.token_limit, self.names, not_enforced(self.schemas)
        )

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
    def _one_field_for_each_thing(self) -> ConversationForm:
        check_own(self, self.outrider)
        return self


def assistant_message(content: str, reasoning: str, calls: Sequence[Any]) -> dict[str, Any]:
    """Return an answer in the form that chat templates take."""
    given = {"reasoning_content": reasoning, "tool_calls": [*calls]}
    return {"role": "assistant", "content": content} | {name: value for name, value in given.items() if value}


def made_call(id_: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call in the form that chat templates take; `arguments`: JSON."""
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return a function that the answer may call, as the router takes it."""
    given = {"description": description, "parameters": parameters}
    function = {"name": name} | {field: value for field, value in given.items() if value is not None}
    return {"type": "function", "function": function}
