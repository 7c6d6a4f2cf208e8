"""What an answer has to be, from the SDK's options, and the object that it stands for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from outrider.core.json_bounds import check_json
from outrider.core.session.contract import Grammar
from outrider.errors import InvalidRequest


def grammar_of(options: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar of a request's options; None: they have none. Raises InvalidRequest."""
    given = [name for name in _TEXTS if options.get(name) is not None]
    if len(given) > 1:
        raise InvalidRequest(given[1], f"does not go with {given[0]}: an answer has one of them")
    if not given:
        return None
    kind, text = _TEXTS[given[0]]
    return Grammar(kind, text(options[given[0]]))


def parsed(schema: Any, text: str) -> Any:
    """Return the object that the text, JSON of a schema, stands for. Raises ValueError."""
    return schema.model_validate_json(text) if _is_model(schema) else json.loads(text)


def _is_model(schema: Any) -> bool:
    """Return whether a schema is the class of a pydantic model."""
    return hasattr(schema, "model_json_schema")


def _schema(schema: Any) -> str:
    made = schema.model_json_schema() if _is_model(schema) else schema
    if not isinstance(made, Mapping):
        raise InvalidRequest("schema", f"is a {type(schema).__name__}, must be a JSON schema or a pydantic model")
    try:
        text = json.dumps(made)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest("schema", f"is no JSON: {error}") from None
    check_json("schema", text)
    return text


def _choices(choices: Any) -> str:
    if isinstance(choices, str) or not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidRequest("choices", "must be strings, at least one, and none of them empty")
    return json.dumps([*choices])


def _string(name: str) -> Callable[[Any], str]:
    def checked(text: Any) -> str:
        if not isinstance(text, str):
            raise InvalidRequest(name, f"is a {type(text).__name__}, must be a string")
        return text

    return checked


_TEXTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "schema": ("json_schema", _schema),
    "regex": ("regex", _string("regex")),
    "choices": ("choices", _choices),
    "grammar": ("lark", _string("grammar")),
}  # by option: the grammar's kind, and what makes its text
