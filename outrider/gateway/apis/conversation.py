"""What the bodies of Anthropic's Messages and OpenAI's Responses share: each becomes the call that a chat becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from outrider.gateway.schema import UNSUPPORTED, AnswerRequest, LenientBody, ResponseTerms, not_enforced


class TypedPart(LenientBody):
    """A part of a request with a type, and the fields that this type needs. A type that is not served is refused."""

    NEEDS: ClassVar[Mapping[str, Sequence[str]]] = {}  # the fields of each type
    WHAT: ClassVar[str] = ""  # what the part is
    WHY: ClassVar[str] = ""  # why others are not served

    type: str

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> TypedPart:
        needed = self.NEEDS.get(self.type)
        if needed is None:
            raise PydanticCustomError(UNSUPPORTED, f"has {self.WHAT} of type {self.type[:64]!r}: {self.WHY}")
        for name in needed:
            if getattr(self, name) is None:
                raise ValueError(f"{self.WHAT} of type {self.type} needs {name}")
        return self


class ConversationForm(AnswerRequest):
    """What both share: there is one answer."""

    @property
    def terms(self) -> ResponseTerms:
        """What is asked for of the answer."""
        return ResponseTerms(
            self.model, 1, self.stream, False, False, None, self.token_limit, self.names, not_enforced(self.schemas)
        )


def assistant_message(content: str, reasoning: str, calls: Sequence[Any]) -> dict[str, Any]:
    """Return an answer in the form that chat templates take."""
    given = {"reasoning_content": reasoning, "tool_calls": [*calls]}
    return {"role": "assistant", "content": content} | {name: value for name, value in given.items() if value}


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return a function that the answer may call, as the router takes it."""
    given = {"description": description, "parameters": parameters}
    function = {"name": name} | {field: value for field, value in given.items() if value is not None}
    return {"type": "function", "function": function}
