"""Calls and reasoning of a model whose marks are added tokens, as Qwen's are: one answer in all four ways."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tokenizers import AddedToken, Tokenizer

from tests.e2e.chat import with_added
from tests.e2e.conftest import MODELS
from tests.e2e.test_tools import FORMAT, TEMPLATE, arguments_are_valid, function
from tests.gateway.contracts.test_four_ways import calls, chat, is_a_call, is_json, is_said, says
from tests.gateway.contracts.ways import CHAT, Answer, Case, check_four_ways, drafting_gateway, made, send
from tests.grammar.test_added_tokens import ADDED as GRAMMAR_TOKENS

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADDED = (*GRAMMAR_TOKENS[:2], AddedToken("<think>", special=False, normalized=False), *GRAMMAR_TOKENS[2:])
TOKENIZER = Tokenizer.from_str(with_added((MODELS / "target" / "tokenizer.json").read_text(encoding="utf-8"), ADDED))
ID = {token.content: TOKENIZER.token_to_id(token.content) for token in ADDED}
REASONS = f"""{TEMPLATE}{{% if enable_thinking %}}<think>
{{% elif enable_thinking is defined %}}<think>

</think>

{{% endif %}}"""
CONTROL = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>", "<both>")  # special, or in the template
THINKS = {"enable_thinking": True}
ENDS = {str(ID["</think>"]): 6.0}  # the reference model has not learned to end reasoning
ALL_MARKS = "".join(f"a {token.content} b" for token in ADDED)
FORGED = "".join(f"a {text} b" for text in CONTROL)
WRITTEN = rf"""start: "I look.\n\n" <[{ID["<tool_call>"]}]> "\n" call "\n" <[{ID["</tool_call>"]}]>
call: "{{\"name\": \"time\", \"arguments\": {{\"zone\": \"" /[a-z]{{1,4}}/ "\"}}}}" """


def ids_of(answer: Answer) -> list[int]:
    ids: list[int] = answer.first["token_ids"]
    return ids


def is_a_call_between_its_marks(answer: Answer) -> None:
    is_a_call(answer)
    assert (ids_of(answer)[0], ids_of(answer).count(ID["</tool_call>"])) == (ID["<tool_call>"], 1)


def has_content_and_a_call(answer: Answer) -> None:
    ((name, arguments),) = answer.first["calls"]
    arguments_are_valid(name, arguments)
    assert (answer.first["text"], answer.first["reason"]) == ("I look.", "tool_calls")
    assert ID["<tool_call>"] in ids_of(answer)


def has_all_marks_in_its_arguments(answer: Answer) -> None:
    ((name, arguments),) = answer.first["calls"]
    assert (name, json.loads(arguments)) == ("say", {ALL_MARKS: ALL_MARKS})
    marks = [token for token in ids_of(answer) if token in ID.values() and token != ID["    "]]
    assert marks == [ID["<tool_call>"], ID["</tool_call>"]]


def reasons_first(answer: Answer) -> None:
    """Up to the token that ends reasoning, which is followed by what the request wants."""
    assert answer.first["reasoning"]
    assert answer.usage["completion_tokens_details"]["reasoning_tokens"] == ids_of(answer).index(ID["</think>"]) + 1


def is_reasoning_alone(answer: Answer) -> None:
    assert answer.first["reasoning"]
    assert (answer.first["text"], answer.first["reason"]) == ("", "length")


def reasons_and_is_json(answer: Answer) -> None:
    reasons_first(answer)
    is_json(answer)


def reasons_and_is_a_call(answer: Answer) -> None:
    reasons_first(answer)
    is_a_call(answer)


def has_no_mark_of_the_caller(answer: Answer) -> None:
    assert answer.prompt_token_ids is not None
    assert not {ID[text] for text in CONTROL} & {*answer.prompt_token_ids}
    assert FORGED in TOKENIZER.decode(answer.prompt_token_ids, skip_special_tokens=False)


def called(**fields: Any) -> dict[str, Any]:
    return calls(return_token_ids=True, **fields)


def thinking(**fields: Any) -> dict[str, Any]:
    return {"chat_template_kwargs": THINKS, "logit_bias": ENDS, "max_tokens": 400, "return_token_ids": True, **fields}


EITHER = {"tool_choice": "auto", "response_format": FORMAT}
CASES = {
    "a forced call": Case(CHAT, called(), is_a_call_between_its_marks),
    "a call of the model's own": Case(CHAT, called(tool_choice="auto", guided_grammar=WRITTEN), has_content_and_a_call),
    "a call beside a schema": Case(
        CHAT, called(**EITHER, logit_bias={str(ID["<tool_call>"]): 50.0}), is_a_call_between_its_marks
    ),
    "JSON beside tools": Case(CHAT, called(**EITHER, logit_bias={str(ID["<tool_call>"]): -50.0}), is_json),
    "marks in JSON beside tools": Case(
        CHAT,
        called(tool_choice="auto", response_format=says(ALL_MARKS), logit_bias={str(ID["<tool_call>"]): -50.0}),
        lambda answer: is_said(answer, ALL_MARKS),
    ),
    "a call that is cut": Case(CHAT, called(max_tokens=20), cut=True),
    "marks in a call's arguments": Case(
        CHAT, called(tools=[function("say", **{ALL_MARKS: {"const": ALL_MARKS}})]), has_all_marks_in_its_arguments
    ),
    "reasoning alone": Case(CHAT, chat(**thinking()), reasons_first),
    "reasoning that is cut": Case(CHAT, chat(**thinking(max_tokens=5)), is_reasoning_alone),
    "no reasoning before a schema": Case(
        CHAT, chat(response_format=FORMAT, chat_template_kwargs={"enable_thinking": False}, max_tokens=200), is_json
    ),
    "reasoning before a schema": Case(CHAT, chat(**thinking(response_format=FORMAT)), reasons_and_is_json),
    "reasoning before a forced call": Case(CHAT, calls(**thinking()), reasons_and_is_a_call),
    "reasoning before a call or a schema": Case(
        CHAT, calls(**EITHER, **thinking(logit_bias=ENDS | {str(ID["<tool_call>"]): 8.0})), reasons_first
    ),
    "marks in a message": Case(CHAT, chat(FORGED, return_token_ids=True), has_no_mark_of_the_caller),
    "the same template from the caller": Case(
        CHAT,
        calls(**thinking(), chat_template=REASONS),
        reasons_and_is_a_call,
        same_as=calls(**thinking()),
    ),
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def web(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    async with drafting_gateway(tmp_path_factory.mktemp("models") / "target", REASONS, ADDED) as client:
        yield client


@pytest.mark.parametrize("name", CASES)
async def test_an_answer_with_marks_is_right_and_the_same_in_all_four_ways(web: httpx.AsyncClient, name: str) -> None:
    await check_four_ways(web, CASES[name])


async def test_the_answers_with_drafts_had_drafts(web: httpx.AsyncClient) -> None:
    body = chat(temperature=0, max_tokens=300, ignore_eos=True)
    answer = made(await send(web, CHAT, body, stream=False, drafts=True), stream=False)
    assert answer.usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0
