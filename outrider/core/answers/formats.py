"""The forms in which models write calls of tools, and grammars of answers that have to contain some.

A model's form follows from its chat template, which shows the calls of earlier turns as the model has learned them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from outrider.core.answers.schemas import WHITESPACE, closed, followable, nested
from outrider.core.json_bounds import JsonBounds
from outrider.core.session.contract import Grammar
from outrider.errors import InvalidRequest

MAX_TOOLS = 128
CALL_ID = "[CALL_ID]"  # before a call's number, where there is a separator
MAX_CALLS = 32  # of one answer that has to make calls
FLEXIBLE = {"whitespace_pattern": WHITESPACE}
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as templates write JSON


class ToolFormat(NamedTuple):
    """The form of one family of models. A call is a JSON object with the tool's name and its arguments, or the name, a
    separator, and the arguments."""

    name: str
    begin: str  # before a call; before the list of all calls, if they are `listed`
    end: str  # after it
    between: str  # two calls
    arguments: str  # key of the arguments
    listed: bool  # all calls are in one JSON list
    marks: tuple[str, ...]  # in the chat templates of such models
    separator: str = ""  # between name and arguments; empty: a call is one object
    short_ids: bool = False  # the template takes only ids of nine letters and digits: see `short_id`

    @property
    def written(self) -> tuple[str, ...]:
        """What answers have around calls, which may be added tokens."""
        texts = (self.begin.strip(), self.end.strip(), self.separator, CALL_ID if self.separator else "")
        return tuple(text for text in texts if text)


FORMATS = {
    each.name: each
    for each in (
        ToolFormat("hermes", "<tool_call>\n", "\n</tool_call>", "\n", "arguments", False, ("<tool_call>",)),
        ToolFormat("mistral11", "[TOOL_CALLS]", "", "", "arguments", False, ("[TOOL_CALLS]", "[ARGS]"), "[ARGS]", True),
        ToolFormat(
            "mistral", "[TOOL_CALLS]", "", ", ", "arguments", True, ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"), "", True
        ),
        ToolFormat("llama3", "", "", "; ", "parameters", False, ("<|start_header_id|>", '"parameters"')),
    )
}  # by name; hermes: Hermes 2 Pro and later, Qwen 2.5 and 3; mistral11: tokenizers from version 11 on; llama3: from 3.1


def short_id(given: str) -> str:
    """Return the id of a call as such templates take it; equal ids stay equal."""
    if re.fullmatch(r"[a-zA-Z0-9]{9}", given):
        return given
    return hashlib.blake2b(given.encode(errors="surrogatepass")).hexdigest()[:9]


class Tools(NamedTuple):
    """The tools of a request."""

    definitions: tuple[Mapping[str, Any], ...]  # in OpenAI's form
    required: bool = False  # the answer has to call one
    name: str = ""  # the one that it has to call
    single: bool = False  # at most one call

    @property
    def forced(self) -> bool:
        """Whether the answer has to be calls."""
        return self.required or bool(self.name)


def format_of(template: str, name: str = "") -> ToolFormat | None:
    """Return the form of a chat template; None if it knows no tools, or none of these forms. `name`: of the form, if it
    is known otherwise."""
    if name:
        return FORMATS[name]
    if "tools" not in template:
        return None
    return next((each for each in FORMATS.values() if all(mark in template for mark in each.marks)), None)


def read_tools(
    definitions: str, bounds: JsonBounds, *, required: bool = False, name: str = "", single: bool = False
) -> Tools:
    """Return a request's tools; `bounds` are those of its JSON. Raises InvalidRequest for what are no functions in
    OpenAI's form."""
    bounds.check("tools", definitions)
    try:
        tools = json.loads(definitions)
    except ValueError as error:
        raise InvalidRequest("tools", f"are no JSON: {error}") from None
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise InvalidRequest("tools", f"must be a list of 1 to {MAX_TOOLS} functions")
    names = [_checked(index, tool)["name"] for index, tool in enumerate(tools)]
    if len({*names}) < len(names):
        raise InvalidRequest("tools", "must have names that differ")
    if name and name not in names:
        raise InvalidRequest("tool_choice", f"is {name!r}, which is none of the tools: {', '.join(names)}")
    return Tools(tuple(tools), required, name, single)


def _checked(index: int, tool: Any) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequest(f"tools[{index}]", 'must be {"type": "function", "function": {"name": "...", ...}}')
    if not isinstance(function.get("parameters") or {}, dict):
        raise InvalidRequest(f"tools[{index}].function.parameters", "must be a JSON schema")
    return function


def calls_grammar(
    form: ToolFormat, tools: Tools, added: Callable[[str], int | None], schema: Mapping[str, Any] | None = None
) -> Grammar:
    """Return the grammar of an answer that is one or more calls, or where there is a `schema`, JSON of it; `added`
    returns the id of an added token, None for another text.

    Raises InvalidRequest for a schema that no answer can follow.
    """
    functions = [tool["function"] for tool in tools.definitions]
    wanted = [function for function in functions if tools.name in ("", function["name"])]
    begin, end, between = (_terminals(text, added) for text in (form.begin, form.end, form.between))
    call, opening, closing = (
        ("function", f'{begin} "[" ', ' "]"') if form.listed else (f"{begin} function {end}", "", "")
    )
    more = "" if tools.single or tools.name else f" ({between} call){{0,{MAX_CALLS - 1}}}"
    rules = [f"start: {opening}call{more}{closing}", f"call: {call}"]
    if schema is not None:
        answer = json.dumps({**_answer_schema(schema), "x-guidance": FLEXIBLE})
        rules = ["start: calls | answer", f"answer: %json {answer}", rules[0].replace("start", "calls", 1), rules[1]]
    rules.append("function: " + " | ".join(f"f{index}" for index in range(len(wanted))))
    rules += [f"f{index}: {_call(form, function, added)}" for index, function in enumerate(wanted)]
    return Grammar("lark", "\n".join(rules))


def _call(form: ToolFormat, function: Mapping[str, Any], added: Callable[[str], int | None]) -> str:
    """Return what a call of a function is, in Lark's form."""
    if not form.separator:
        return f"%json {json.dumps(_call_schema(form, function))}"
    number = f"({_terminals(CALL_ID, added)} /[a-zA-Z0-9]{{9}}/)? " if added(CALL_ID) is not None else ""
    arguments = {**_arguments_schema(function), "x-guidance": COMPACT}
    name, separator = json.dumps(function["name"]), _terminals(form.separator, added)
    return f"{name} {number}{separator} %json {json.dumps(arguments)}"


def _terminals(text: str, added: Callable[[str], int | None]) -> str:
    """Return the text in Lark's form, an added token in it as such."""
    bare = text.strip()
    id_ = added(bare) if bare else None
    if id_ is None:
        return json.dumps(text) if text else ""
    parts = text.partition(bare)
    return " ".join(f"<[{id_}]>" if part == bare else json.dumps(part) for part in parts if part)


def _call_schema(form: ToolFormat, function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = nested(_arguments_schema(function), f"/properties/{form.arguments}")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, form.arguments: arguments},
        "required": ["name", form.arguments],
        "additionalProperties": False,
        "x-guidance": COMPACT,
    }


def _arguments_schema(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a function's arguments. One that says nothing of them has none.

    Raises InvalidRequest for a schema that no answer can follow.
    """
    given = function.get("parameters") or {}
    says_nothing = given.keys() <= {"type", "title", "description", "required", "$schema"}
    try:
        given = {**given, "type": "object", "properties": {}} if says_nothing else followable(given).schema
    except ValueError as error:
        raise InvalidRequest("tools", f"{function['name']}: {error}") from None
    schema: Mapping[str, Any] = closed(given)
    return schema


def _answer_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of an answer. Raises InvalidRequest for one that no answer can follow."""
    try:
        made: Mapping[str, Any] = closed(followable(schema).schema)
    except ValueError as error:
        raise InvalidRequest("grammar", f"cannot be read: {error}") from None
    return made


def read_calls(field: str, text: str, bounds: JsonBounds) -> tuple[dict[str, Any], ...]:
    """Return the calls of an earlier message as chat templates take them: their arguments are objects, not text.
    `bounds` are those of the request's JSON.

    Raises InvalidRequest naming the field for what are no calls in OpenAI's form.
    """
    try:
        bounds.check(field, text)
        return tuple(_with_object(field, call, bounds) for call in json.loads(text))
    except (ValueError, TypeError, LookupError, AttributeError):
        form = '[{"id": "...", "type": "function", "function": {"name": "...", "arguments": "{...}"}}, ...]'
        raise InvalidRequest(field, f"must be calls: {form}") from None


def _with_object(field: str, call: Mapping[str, Any], bounds: JsonBounds) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        bounds.check(field, arguments)
        arguments = json.loads(arguments)
    function["arguments"] = arguments
    if not isinstance(function["name"], str) or not isinstance(function["arguments"], dict):
        raise TypeError
    return {**call, "function": function}
