"""Answers that have to be calls are calls that the reader finds, with arguments of the tool's schema."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
from pydantic import BaseModel, Field
from tokenizers import Tokenizer

from outrider.core.answers.call_reader import CallReader
from outrider.core.answers.formats import FORMATS, Tools, calls_grammar, format_of, read_calls, read_tools
from outrider.core.json_bounds import JsonBounds
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract
from outrider.errors import InvalidRequest
from outrider.grammar.compiler import GrammarCompiler

FOLDER = Path(__file__).parents[3] / "models" / "target"
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
VOCABULARY, EOS = 4096, 4095


def function(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = (
    function("weather", city={"enum": ["Bern", "Ulm"]}, days={"type": "integer", "minimum": 1, "maximum": 9}),
    function("time", zone={"enum": ["here", "there"]}),
    {"type": "function", "function": {"name": "stop"}},
)


def answer(form: str, tools: Tools, seed: int, schema: dict[str, Any] | None = None) -> str:
    """An answer of a model that knows nothing, to its end."""
    grammar = calls_grammar(FORMATS[form], tools, lambda text: None, schema)
    contract = Contract(seed=seed, max_tokens=999, stop_ids=(EOS,), grammar=grammar)
    compiler = GrammarCompiler(FOLDER, VOCABULARY, [EOS])
    sampler = Sampler(contract, VOCABULARY, [5, 6], 2, grammar=compiler.start(grammar))
    random, tokens = np.random.default_rng(seed), list[int]()
    bias = np.where(np.arange(VOCABULARY) == EOS, 3.0 * (seed % 2), 0.0).astype(np.float32)
    while len(tokens) < 999:
        token = sampler.choose(random.standard_normal(VOCABULARY).astype(np.float32) + bias).token
        if token == EOS:
            text: str = TOKENIZER.decode(tokens)
            return text
        tokens.append(token)
        sampler.extend([token])
    raise AssertionError("it does not end")


@pytest.mark.parametrize("form", [*FORMATS])
@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        ({"required": True}, {"weather", "time", "stop"}),
        ({"required": True, "single": True}, {"weather", "time", "stop"}),
        ({"name": "time"}, {"time"}),
    ],
)
def test_an_answer_that_must_be_calls_has_no_other_content(form: str, chosen: dict[str, Any], names: set[str]) -> None:
    tools, counts = Tools(TOOLS, **chosen), set()
    for seed in range(6):
        reader = CallReader(FORMATS[form], ("weather", "time", "stop"))
        pieces = [*reader.read(answer(form, tools, seed)), *reader.finish()]
        assert all(piece.call >= 0 for piece in pieces)
        assert {piece.name for piece in pieces if piece.name} <= names
        for number in range(reader.calls):
            own = [piece for piece in pieces if piece.call == number]
            arguments = json.loads("".join(piece.text for piece in own))
            match own[0].name:
                case "weather":
                    assert arguments["city"] in ("Bern", "Ulm")
                    assert 1 <= arguments["days"] <= 9
                case "time":
                    assert arguments in ({"zone": "here"}, {"zone": "there"})
                case _:
                    assert arguments == {}
        counts.add(reader.calls)
    assert min(counts) >= 1
    assert (max(counts) > 1) == (chosen == {"required": True})


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    x: Annotated[int, Field(ge=0, le=9)]
    color: Color


class Shape(BaseModel):
    points: Annotated[list[Point], Field(max_length=2)]
    inner: Shape | None = None


ANSWER = {
    "type": "object",
    "properties": {"rain": {"$ref": "#/$defs/rain"}, "more": {"enum": ["yes", "no"]}},
    "required": ["rain"],
    "$defs": {"rain": {"type": "integer", "minimum": 1, "maximum": 9}},
}


@pytest.mark.parametrize("form", [*FORMATS])
def test_an_answer_beside_a_schema_is_json_of_it_or_calls(form: str) -> None:
    calls = answers = 0
    for seed in range(12):
        reader = CallReader(FORMATS[form], ("weather", "time", "stop"))
        pieces = [*reader.read(answer(form, Tools(TOOLS), seed, ANSWER)), *reader.finish()]
        if reader.called:
            calls += 1
            assert all(piece.call >= 0 for piece in pieces)
        else:
            answers += 1
            made = json.loads("".join(piece.text for piece in pieces))
            assert {"rain"} <= made.keys() <= {"rain", "more"}
            assert 1 <= made["rain"] <= 9
    assert calls
    assert answers


def test_a_schema_beside_tools_that_no_answer_can_follow_is_refused_with_its_place() -> None:
    with pytest.raises(InvalidRequest, match="grammar: cannot be read: #/properties/a/not"):
        calls_grammar(FORMATS["hermes"], Tools(TOOLS), {}.get, {"properties": {"a": {"not": {}}}})


@pytest.mark.parametrize("form", [*FORMATS])
def test_arguments_of_nested_pydantic_models_are_followed(form: str) -> None:
    tool = {"type": "function", "function": {"name": "draw", "parameters": Shape.model_json_schema()}}
    for seed in (1, 3):
        reader = CallReader(FORMATS[form], ("draw",))
        pieces = [*reader.read(answer(form, Tools((tool,), name="draw"), seed)), *reader.finish()]
        shape = json.loads("".join(piece.text for piece in pieces))
        Shape.model_validate(shape)
        assert shape.keys() <= {"points", "inner"}


@pytest.mark.parametrize("parameters", [{}, {"type": "object"}, {"type": "object", "properties": {}, "required": []}])
def test_a_function_without_parameters_has_no_arguments(parameters: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "stop", "parameters": parameters}}
    assert json.loads(answer("llama3", Tools((tool,), name="stop"), 1))["parameters"] == {}


def test_special_tokens_are_named_by_their_ids() -> None:
    grammar = calls_grammar(FORMATS["mistral"], Tools(TOOLS), {"[TOOL_CALLS]": 5}.get)
    assert grammar.text.startswith('start: <[5]> "[" call (", " call){0,31} "]"')
    grammar = calls_grammar(FORMATS["hermes"], Tools(TOOLS, name="time"), {"<tool_call>": 7, "</tool_call>": 8}.get)
    assert grammar.text.startswith('start: call\ncall: <[7]> "\\n" function "\\n" <[8]>\n')


def test_a_calls_number_precedes_its_arguments_where_the_model_has_a_token_for_it() -> None:
    ids = {"[TOOL_CALLS]": 5, "[CALL_ID]": 6, "[ARGS]": 7}
    grammar = calls_grammar(FORMATS["mistral11"], Tools(TOOLS, name="time"), ids.get)
    assert grammar.text.startswith("start: call\ncall: <[5]> function \nfunction: f0\n")
    assert 'f0: "time" (<[6]> /[a-zA-Z0-9]{9}/)? <[7]> %json {' in grammar.text


def test_the_form_of_a_template_may_be_set() -> None:
    form = format_of("{{ messages }}", "llama3")
    assert form is FORMATS["llama3"]


def test_the_form_follows_from_the_template() -> None:
    found = {
        "{% if tools %}<tool_call>{% endif %}": "hermes",
        "[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]": "mistral",
        "[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]": "mistral11",
        '<|start_header_id|>{{ tools }} {"name": x, "parameters": y}': "llama3",
        "{{ messages }}<tool_call>": None,
        "{{ tools }}": None,
    }
    for template, name in found.items():
        form = format_of(template)
        assert (form and form.name) == name


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "64 levels"),
        ("[]", "a list of 1 to 128"),
        ("{}", "a list of 1 to 128"),
        (json.dumps([function("a")] * 2), "names that differ"),
        (json.dumps([function("a")]), "none of the tools: a"),
        (json.dumps([{"type": "function", "function": {}}]), r"tools\[0\]"),
        (json.dumps([{"type": "function", "function": {"name": "b", "parameters": [1]}}]), "must be a JSON schema"),
        ("[3]", r"tools\[0\]"),
    ],
)
def test_malformed_tools_are_refused_by_name(text: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        read_tools(text, JsonBounds(), name="b")


def test_templates_see_the_arguments_of_earlier_calls_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "time", "arguments": '{"zone": "here"}'}}
    (seen,) = read_calls("x", json.dumps([call]), JsonBounds())
    assert seen["function"] == {"name": "time", "arguments": {"zone": "here"}}
    assert seen["id"] == "1"


@pytest.mark.parametrize(
    "text", ["{", "3", "[3]", "[{}]", '[{"function": {"name": 3}}]', '[{"function": {"name": "a", "arguments": "["}}]']
)
def test_malformed_calls_are_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[2\].tool_calls"):
        read_calls("messages[2].tool_calls", text, JsonBounds())
