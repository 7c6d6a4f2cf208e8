"""What a request's options say about its answer: the form that it has to have, and the tools that it may call."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outrider.core.answers.answer_reader import AnswerTerms
from outrider.core.json_bounds import check_json
from outrider.core.session.contract import Grammar
from outrider.errors import InvalidRequest
from outrider.wire import inference as wire


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
    return _dump("schema", made)


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


def tools_of(options: Mapping[str, Any]) -> wire.Tools | None:
    """Return the tools of a request's options; None: it has none. Raises InvalidRequest."""
    tools, choice = options.get("tools"), options.get("tool_choice", "auto")
    name = _name(choice)
    if not tools:
        if name or choice == "required":
            raise InvalidRequest("tool_choice", "needs tools")
        return None
    if choice == "none":
        return None
    single = not options.get("parallel_tool_calls", True)
    return wire.Tools(definitions=_json("tools", tools), required=choice == "required", name=name, single=single)


def terms_of(options: Mapping[str, Any]) -> AnswerTerms:
    """Return what the answer to a request with these options may have in it."""
    tools = () if options.get("tool_choice") == "none" else options.get("tools") or ()
    functions = [tool.get("function") for tool in tools if isinstance(tool, Mapping)]
    names = tuple(str(it.get("name")) for it in functions if isinstance(it, Mapping))
    return AnswerTerms(names, schema=options.get("schema") is not None)


def calls_json(field: str, calls: Any) -> str:
    """Return the JSON of an earlier message's calls; "" if it has none. Raises InvalidRequest."""
    return _json(field, calls) if calls else ""


def object_json(field: str, values: Any) -> str:
    """Return the JSON of an object. Raises InvalidRequest."""
    if not isinstance(values, Mapping):
        raise InvalidRequest(field, "must be a mapping")
    return _dump(field, dict(values))


def _name(choice: Any) -> str:
    if choice in ("auto", "none", "required"):
        return ""
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        form = '{"type": "function", "function": {"name": "..."}}'
        raise InvalidRequest("tool_choice", f"must be auto, none, required or {form}")
    return name


def _json(field: str, values: Any) -> str:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise InvalidRequest(field, "must be a list")
    return _dump(field, [*values])


def _dump(field: str, value: Any) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(field, f"cannot be written as JSON: {error}") from None
    check_json(field, text)
    return text


_TEXTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "schema": ("json_schema", _schema),
    "regex": ("regex", _string("regex")),
    "choices": ("choices", _choices),
    "grammar": ("lark", _string("grammar")),
}  # by option: the grammar's kind, and what makes its text
