"""Reasoning is divided from what follows it, the same however the answer comes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.answers.answer_reader import AnswerReader, AnswerTerms, ModelForm
from outrider.core.answers.call_reader import CONTENT, REASONING
from outrider.core.answers.reasoning import ReasoningCounter, reasoning_behind

CALL = '<tool_call>\n{"name": "time", "arguments": {"zone": 1}}\n</tool_call>'
CASES = [
    ("marked", "<think>\nIt is <b> late.\n</think>\n\nNoon.", "It is <b> late.", "Noon."),
    ("marked", "\n<think></think>Noon.", "", "Noon."),
    ("marked", "Noon, <think>", "", "Noon, <think>"),
    ("marked", "<th", "", "<th"),
    ("marked", "<think>never\n", "never\n", ""),
    ("opened", "late\n\n</think>\n\nNoon.\n", "late", "Noon.\n"),
    ("opened", "late </thi", "late </thi", ""),
    ("", "<think>a</think>b", "", "<think>a</think>b"),
    ("marked", f"<think>\nI call.\n</think>\n\n{CALL}", "I call.", ""),
]


def divided(form: str, pieces: list[str]) -> tuple[str, str, int]:
    reader = AnswerReader(ModelForm("hermes", form), AnswerTerms(("time",)))
    found = [*(piece for text in pieces for piece in reader.read(text)), *reader.finish()]
    reasoning, content = ("".join(it.text for it in found if it.call == kind) for kind in (REASONING, CONTENT))
    return reasoning, content, sum(bool(it.name) for it in found)


@pytest.mark.parametrize(("form", "text", "reasoning", "content"), CASES)
def test_a_whole_answer_is_divided_into_reasoning_and_content(
    form: str, text: str, reasoning: str, content: str
) -> None:
    assert divided(form, [text]) == (reasoning, content, int(CALL in text))


@given(st.sampled_from(CASES), st.integers(1, 9))
def test_an_answer_in_pieces_of_any_length_is_divided_alike(case: tuple[str, str, str, str], length: int) -> None:
    form, text, reasoning, content = case
    pieces = [text[place : place + length] for place in range(0, len(text), length)]
    assert divided(form, pieces) == (reasoning, content, int(CALL in text))


COUNTED = [
    ("marked", "\n<think>\nlate\n</think>\n\nNoon.", "\n<think>\nlate\n</think>"),
    ("marked", "Noon, <think>no</think>", ""),
    ("marked", "<th", ""),
    ("marked", "<think>never", "<think>never"),
    ("opened", "late</think>a</think>", "late</think>"),
    ("", "<think>a</think>b", ""),
]


@pytest.mark.parametrize(("form", "text", "counted"), COUNTED)
@pytest.mark.parametrize("length", range(1, 12))
def test_tokens_of_reasoning_are_counted_to_the_one_that_completes_the_end_mark(
    form: str, text: str, counted: str, length: int
) -> None:
    counter = ReasoningCounter(form)
    for place in range(0, len(text), length):
        counter.add(text[place : place + length])
    assert counter.tokens == -(-len(counted) // length)


@pytest.mark.parametrize(
    ("prompt", "reasoning"),
    [("<user>x\n<think>\n", "opened"), ("<think>\n\n</think>\n\n", ""), ("<think>x</think> So?", "marked")],
)
def test_the_end_of_the_prompt_decides_whether_an_answer_has_reasoning(prompt: str, reasoning: str) -> None:
    assert reasoning_behind(prompt) == reasoning
