"""Calls are read out of an answer the same however it is divided, and what is no call stays text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outrider.core.answers.answer_reader import AnswerReader, AnswerTerms, ModelForm
from outrider.core.answers.call_reader import REASONING, CallPiece, CallReader
from outrider.core.answers.formats import FORMATS, ToolFormat
from outrider.core.answers.reasoning import BEGIN, END, Reasoning

NAMES = ("weather", "time")
ARGUMENTS = '{"city": "Bern {\\"x\\"]", "days": [1, 2], "deep": {"a": {}}}'
WEATHER = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
TIME = '{"parameters": {}, "name": "time"}'
OTHER = '{"name": "launch", "arguments": {}}'

Read = tuple[str, list[tuple[str, str]]]

CASES: list[tuple[str, str, Read]] = [
    ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", ("", [("weather", ARGUMENTS)])),
    (
        "hermes",
        f"Let me see.\n\n<tool_call>{TIME}</tool_call>\n<tool_call>\n{WEATHER}\n</tool_call>\n",
        ("Let me see.", [("time", "{}"), ("weather", ARGUMENTS)]),
    ),
    ("hermes", f"<tool_call>\n{OTHER}\n</tool_call> Done.", (" Done.", [("launch", "{}")])),
    ("hermes", "if a <tool and b < c: \n", ("if a <tool and b < c: \n", [])),
    ("hermes", "<tool_call>\nnot now</tool_call>", ("not now", [])),
    ("hermes", "</tool_call> or </tool", (" or </tool", [])),
    ("hermes", '<tool_call>\n{"name": "time", "arguments": {"zo', ('{"name": "time", "arguments": {"zo', [])),
    ("hermes", '<tool_call>\n{"na', ('{"na', [])),
    ("hermes", '<tool_call>\n{"name": "time", "arguments": {"x": 7}\n</tool_call>!', ("!", [("time", '{"x": 7}')])),
    ("hermes", '<tool_call>\n{"name": "time", "arguments": {"x": 7}', ("", [("time", '{"x": 7}')])),
    ("hermes", '<tool_call>\n{"name": "time"}\n</tool_call>', ("", [("time", "{}")])),
    ("hermes", '<tool_call>\n{"name": "time"} so\n</tool_call>', (" so", [("time", "{}")])),
    ("hermes", f"<tool_call>{TIME}</tool_call><tool_call>{WEATHER[:40]}", (WEATHER[:40], [("time", "{}")])),
    (
        "hermes",
        '<tool_call>{"name": "time", "arguments": {x: 7}}</tool_call>',
        ('{"name": "time", "arguments": {x: 7}}', []),
    ),
    ("hermes", '<tool_call>{"name": "time", "arguments": 7}</tool_call>', ('{"name": "time", "arguments": 7}', [])),
    ("hermes", '<tool_call>{"name": "time", "arguments": "no"}', ('{"name": "time", "arguments": "no"}', [])),
    ("hermes", WEATHER, (WEATHER, [])),
    ("llama3", WEATHER, ("", [("weather", ARGUMENTS)])),
    ("llama3", f" {TIME}; {WEATHER}", ("", [("time", "{}"), ("weather", ARGUMENTS)])),
    ("llama3", OTHER, (OTHER, [])),
    ("llama3", f"Use {WEATHER}", (f"Use {WEATHER}", [])),
    ("llama3", '{"city": "Bern"}', ('{"city": "Bern"}', [])),
    ("llama3", "[1, 2]", ("[1, 2]", [])),
    ("llama3", f"[{TIME}, {WEATHER}]", ("", [("time", "{}"), ("weather", ARGUMENTS)])),
    ("mistral", f"[TOOL_CALLS] [{TIME}, {WEATHER}]", ("", [("time", "{}"), ("weather", ARGUMENTS)])),
    ("mistral", f"[TOOL_CALLS][{OTHER}]", ("", [("launch", "{}")])),
    ("mistral", f"[{WEATHER}]", ("", [("weather", ARGUMENTS)])),
    ("mistral", "[a link](x)", ("[a link](x)", [])),
    ("mistral", "  ", ("  ", [])),
    ("mistral", '[{"name": "time", "arguments": "{\\"zone\\": 1}"}]', ("", [("time", '{"zone": 1}')])),
    ("mistral11", f"I look.[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", ("I look.", [("weather", ARGUMENTS)])),
    (
        "mistral11",
        f"[TOOL_CALLS]time[CALL_ID]a1b2c3d4e[ARGS] {{}}[TOOL_CALLS]weather[ARGS]{ARGUMENTS}",
        ("", [("time", "{}"), ("weather", ARGUMENTS)]),
    ),
    ("mistral11", "[TOOL_CALLS]time", ("time", [])),
    ("mistral11", f"[TOOL_CALLS]{'x' * 300} y", (f"{'x' * 300} y", [])),
    ("mistral11", "[TOOL_CALLS][ARGS]{}", ("{}", [])),
    ("mistral11", '[TOOL_CALLS]time[ARGS]{"zo', ('time{"zo', [])),
    ("mistral11", "[TOOL_CALLS]time[ARGS]none", ("timenone", [])),
    ("mistral11", "[TOOL_CALLS]time[ARGS]{} then", (" then", [("time", "{}")])),
    ("mistral", f"[TOOL_CALLS] [{TIME}, {WEATHER[:40]}", (WEATHER[:40], [("time", "{}")])),
    ("llama3", '{"name": "time", "parameters": {"zo', ('{"name": "time", "parameters": {"zo', [])),
    ("llama3", '{"name": "time"}', ("", [("time", "{}")])),
    ("mistral11", f"[TOOL_CALLS]{'x' * 300}[ARGS]{{}}", (f"{'x' * 300}[ARGS]{{}}", [])),
    ("mistral11", f"[TOOL_CALLS]{'x' * 256}[ARGS]{{}}", ("", [("x" * 256, "{}")])),
    ("mistral", '[{"name": "time", "arguments": {"q": "[TOOL_CALLS]"}}]', ("", [("time", '{"q": "[TOOL_CALLS]"}')])),
    ("mistral", f"[TOOL_CALLS][{TIME} [TOOL_CALLS][{TIME}]", ("", [("time", "{}"), ("time", "{}")])),
    (
        "hermes",
        '<tool_call>{"name": "time", "arguments": {"x": NaN}}',
        ('{"name": "time", "arguments": {"x": NaN}}', []),
    ),
    ("llama3", '{"name": 3}', ('{"name": 3}', [])),
    ("llama3", '{"name" "time"}', ('{"name" "time"}', [])),
    ("llama3", '{"name": "time", "parameters": {}, oops} more', ("oops} more", [("time", "{}")])),
]


def joined(pieces: list[CallPiece]) -> Read:
    content, calls = "", dict[int, tuple[str, str]]()
    begun = 0
    for piece in pieces:
        if piece.call < 0 or piece.failed:
            assert not piece.name
            content += piece.text
            calls.pop(piece.call, None)
        else:
            assert (piece.call == begun) is bool(piece.name)
            begun += bool(piece.name)
            name, arguments = calls.get(piece.call, (piece.name, ""))
            calls[piece.call] = name, arguments + piece.text
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls.values())
    return content, [*calls.values()]


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_calls_and_content_of_a_whole_answer(form: str, text: str, expected: Read) -> None:
    reader = CallReader(FORMATS[form], NAMES)
    content, calls = joined([*reader.read(text), *reader.finish()])
    assert (content, calls) == expected


@given(st.sampled_from(CASES), st.lists(st.integers(1, 9), max_size=60))
@example(CASES[0], [1] * 60)
def test_an_answer_in_pieces_of_any_length_has_the_same_calls(case: tuple[str, str, Read], lengths: list[int]) -> None:
    form, text, _ = case
    whole, reader, pieces, place = CallReader(FORMATS[form], NAMES), CallReader(FORMATS[form], NAMES), [], 0
    for length in lengths:
        pieces += reader.read(text[place : place + length])
        place += length
    pieces += [*reader.read(text[place:]), *reader.finish()]
    assert joined(pieces) == joined([*whole.read(text), *whole.finish()])


@given(st.text(alphabet='<tool_cal>{}[]":, \nnametie/TOOL_CALLS\\', max_size=80), st.sampled_from([*FORMATS]))
def test_an_answer_without_calls_keeps_its_whole_text(text: str, form: str) -> None:
    reader = CallReader(FORMATS[form], NAMES)
    content, calls = joined([*reader.read(text), *reader.finish()])
    if not calls:
        assert content == text


MARKS = sorted({mark for form in FORMATS.values() for mark in form.written} | {BEGIN, END})
TEXTS = st.lists(st.sampled_from([*MARKS, *'{}[]",:; \\\n', "a", "é"]), max_size=5).map("".join)
VALUES = st.recursive(
    TEXTS | st.integers() | st.booleans() | st.none(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXTS, values, max_size=3),
    max_leaves=5,
)
WAYS: dict[str, Callable[[dict[str, Any], ToolFormat], str]] = {  # to write a call
    "as templates do": lambda given, form: json.dumps({"name": "time", form.arguments: given}, ensure_ascii=False),
    "in lines": lambda given, form: json.dumps({"name": "time", form.arguments: given}, indent=2),
    "arguments first": lambda given, form: json.dumps({form.arguments: given, "name": "time"}),
    "arguments as a text": lambda given, form: json.dumps({"name": "time", form.arguments: json.dumps(given)}),
}


def written(form: ToolFormat, calls: list[dict[str, Any]], way: str) -> str:
    """Calls of one tool as models of that form write them."""
    if form.separator:
        return "".join(f"{form.begin}time{form.separator}{json.dumps(given)}" for given in calls)
    objects = [WAYS[way](given, form) for given in calls]
    if form.listed:
        return f"{form.begin}[{form.between.join(objects)}]{form.end}"
    return form.between.join(f"{form.begin}{one}{form.end}" for one in objects)


@given(
    st.sampled_from([*FORMATS]),
    st.lists(st.dictionaries(TEXTS, VALUES, max_size=3), min_size=1, max_size=2),
    st.sampled_from([*WAYS]),
    st.sampled_from(["", "marked", "opened"]),
)
@example("hermes", [{"text": "say </tool_call> now"}], "as templates do", "")
def test_marks_within_the_strings_of_a_call_are_text_wherever_a_stream_is_cut(
    form: str, calls: list[dict[str, Any]], way: str, reasoning: Reasoning
) -> None:
    before = {"": "", "marked": f"{BEGIN}\nHm.\n{END}\n\n", "opened": f"Hm.\n{END}\n\n"}[reasoning]
    answer = before + written(FORMATS[form], calls, way)
    cuts = [[answer], [*answer], *([answer[:place], answer[place:]] for place in range(1, len(answer)))]
    for pieces in cuts:
        reader = AnswerReader(ModelForm(form, reasoning), AnswerTerms(("time",)))
        read = [part for piece in pieces for part in reader.read(piece)] + reader.finish()
        assert "".join(part.text for part in read if part.call == REASONING) == ("Hm." if reasoning else "")
        content, found = joined([part for part in read if part.call != REASONING])
        assert (content, [(name, json.loads(text)) for name, text in found]) == ("", [("time", it) for it in calls])


@given(st.sampled_from([*FORMATS]), st.lists(VALUES, max_size=3) | st.dictionaries(TEXTS, VALUES, max_size=3))
@example("hermes", {"text": "say </tool_call> now"})
@example("mistral11", {"text": "[TOOL_CALLS]time[ARGS]{}"})
def test_marks_within_the_strings_of_an_answer_to_a_schema_are_text_wherever_a_stream_is_cut(
    form: str, value: Any
) -> None:
    answer = json.dumps(value, ensure_ascii=False)
    for pieces in [[answer], [*answer], *([answer[:place], answer[place:]] for place in range(1, len(answer)))]:
        reader = AnswerReader(ModelForm(form), AnswerTerms(("time",), schema=True))
        assert joined([part for piece in pieces for part in reader.read(piece)] + reader.finish()) == (answer, [])


def test_arguments_are_emitted_before_the_call_is_complete() -> None:
    reader = CallReader(FORMATS["hermes"], NAMES)
    assert reader.read('<tool_call>\n{"name": "time", "arg') == [CallPiece("", 0, "time")]
    assert reader.read('uments": {"zone": "a') == [CallPiece('{"zone": "a', 0)]


def test_a_long_argument_is_read_in_time_that_grows_with_its_length() -> None:
    text = json.dumps({"name": "time", "arguments": {"text": "a" * 1_000_000}})
    reader = CallReader(FORMATS["llama3"], NAMES)
    content, calls = joined([*reader.read(text), *reader.finish()])
    assert not content
    assert len(calls[0][1]) > 1_000_000
