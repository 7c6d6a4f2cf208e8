"""Tools of a request, and the calls in an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.core.answers.answer_reader import AnswerTerms
from outrider.core.json_bounds import check_json
from outrider.errors import InvalidRequest
from outrider.wire import inference as wire


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
    return AnswerTerms(tuple(str(it.get("name")) for it in functions if isinstance(it, Mapping)))


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
        raise InvalidRequest(field, f"are no JSON: {error}") from None
    check_json(field, text)
    return text
