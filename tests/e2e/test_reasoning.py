"""A model that reasons does so before an answer with a form, too, unless the request turns it off."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

import outrider
from outrider.errors import InvalidRequest
from tests.e2e.chat import Clients, chat_clients
from tests.e2e.conftest import MODELS

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEMPLATE = """{% if tools %}<tool_call>{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}
{% endfor %}<assistant>{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% else %}<think>
{% endif %}"""
ASKED: Any = [{"role": "user", "content": "How old is he?"}]
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
TOKENIZER = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
# The reference model has not learned to end reasoning, so it is made likely to.
BIAS = dict(zip(TOKENIZER.encode("</think>").ids, (10.0, 11.0, 15.0, 12.0, 10.0), strict=True))
ENDS: Any = {"logit_bias": BIAS, "max_tokens": 200}


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def clients(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Clients]:
    folder = tmp_path_factory.mktemp("models") / "target"
    async with chat_clients(folder, TEMPLATE, tool_formats={"target": "hermes"}) as both:
        yield both


@pytest.mark.parametrize("seed", [2, 3])  # with which it does
async def test_reasoning_is_free_and_the_following_content_obeys_the_schema(clients: Clients, seed: int) -> None:
    terms: Any = {"messages": ASKED, "schema": SCHEMA, "seed": seed, **ENDS}
    drafted = await clients.sdk.generate(**terms, speculation="rounds")
    plain = await clients.sdk.generate(**terms, speculation="off")
    assert drafted.token_ids == plain.token_ids
    assert drafted.text.partition("</think>")[0].lstrip("\n").startswith(drafted.reasoning)
    assert 1 <= drafted.parsed["age"] <= 99
    assert drafted.finish_reason is outrider.FinishReason.STOP


def reasoning_tokens(made: outrider.Generation) -> int:
    """The first tokens whose text has the end mark; all where no text has."""
    ids = made.token_ids
    return next((n for n in range(len(ids) + 1) if "</think>" in TOKENIZER.decode(ids[:n])), len(ids))


@pytest.mark.parametrize("most", [200, 7])
async def test_reasoning_tokens_are_those_up_to_the_end_mark_however_they_come(clients: Clients, most: int) -> None:
    terms: Any = {"messages": ASKED, "seed": 2, "logit_bias": BIAS, "max_tokens": most}
    made = [await clients.sdk.generate(**terms, speculation=speculation) for speculation in ("rounds", "off")]
    counted = {generation.usage.reasoning_tokens for generation in made}
    assert counted == {reasoning_tokens(made[0])}
    assert (counted == {most}) is (most == 7)
    for stream in (False, True):
        extra: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        bias: Any = {str(token): value for token, value in BIAS.items()}
        answer: Any = await clients.openai.chat.completions.create(
            model="target", messages=ASKED, seed=2, logit_bias=bias, max_tokens=most, **extra
        )
        usage = [part.usage async for part in answer][-1] if stream else answer.usage
        assert {usage.completion_tokens_details.reasoning_tokens} == counted


async def test_a_prefilled_message_is_continued_within_its_reasoning_and_behind_it(clients: Clients) -> None:
    asked = "<user>How old is he?\n<assistant>"
    for prefill, reasons in (("<think>\nHe was born", True), ("<think>\nOld.\n</think>\n\nHe is", False)):
        messages: Any = [*ASKED, {"role": "assistant", "content": prefill}]
        terms: Any = {"seed": 4, "max_tokens": 20}
        made = await clients.sdk.generate(messages=messages, continue_final_message=True, **terms)
        same = await clients.sdk.generate(asked + prefill, **terms)
        assert made.token_ids == same.token_ids
        assert (made.reasoning, made.content) == ((made.text, "") if reasons else ("", made.text))
        assert made.usage.reasoning_tokens == (20 if reasons else 0)
        answer = await clients.openai.chat.completions.create(
            model="target", messages=messages, extra_body={"continue_final_message": True}, **terms
        )
        message: Any = answer.choices[0].message
        assert (message.content, getattr(message, "reasoning_content", "")) == (made.content, made.reasoning)
    with pytest.raises(openai.BadRequestError, match="continue_final_message"):
        await clients.openai.chat.completions.create(
            model="target",
            messages=messages,
            extra_body={"continue_final_message": True, "add_generation_prompt": True},
        )
    with pytest.raises(openai.BadRequestError, match="needs a last message of the assistant"):
        await clients.openai.chat.completions.create(
            model="target", messages=ASKED, extra_body={"continue_final_message": True}
        )


async def test_a_forced_call_may_follow_reasoning(clients: Clients) -> None:
    terms: Any = {"messages": ASKED, "tools": [TOOL], "seed": 5, **ENDS}
    made = await clients.sdk.generate(**terms, tool_choice="required", parallel_tool_calls=False)
    (call,) = made.tool_calls
    assert "</think>" in made.text
    assert 1 <= json.loads(call.arguments)["age"] <= 99


async def test_a_call_or_json_of_a_schema_may_follow_reasoning(clients: Clients) -> None:
    ended = 0
    for seed in range(2, 10):
        terms: Any = {"tools": [TOOL], "parallel_tool_calls": False, "schema": SCHEMA, "seed": seed, **ENDS}
        made = await clients.sdk.generate(messages=ASKED, **terms)
        if made.finish_reason == "stop":  # of itself the model may never end its reasoning
            ended += 1
            assert "</think>" in made.text
            calls = made.tool_calls
            assert 1 <= (json.loads(calls[0].arguments) if calls else made.parsed)["age"] <= 99
    assert ended


async def test_a_request_may_turn_reasoning_off(clients: Clients) -> None:
    off = {"enable_thinking": False}
    made = await clients.sdk.generate(messages=ASKED, schema=SCHEMA, template_variables=off, seed=6, max_tokens=99)
    assert (made.reasoning, json.loads(made.text).keys()) == ("", {"age"})
    form: Any = {"type": "json_schema", "json_schema": {"name": "age", "schema": SCHEMA}}
    answer = await clients.openai.chat.completions.create(
        model="target",
        messages=ASKED,
        response_format=form,
        seed=6,
        max_tokens=99,
        extra_body={"chat_template_kwargs": off},
    )
    assert answer.choices[0].message.content == made.text
    assert "reasoning_content" not in (answer.choices[0].message.model_extra or {})


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"messages": []}, "'messages', which the router sets"),
        ({"eos_token": ""}, "'eos_token', which the router sets"),
        ({"x": "x" * 2**14}, "at most 16384"),
        ({"x": float}, "cannot be written as JSON"),
        ([("x", 1)], "must be a mapping"),
    ],
)
async def test_a_template_variable_that_the_router_sets_is_refused_by_name(
    clients: Clients, variables: Any, problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        await clients.sdk.generate(messages=ASKED, template_variables=variables)


async def test_prompts_have_no_template(clients: Clients) -> None:
    with pytest.raises(InvalidRequest, match="template_variables: are for messages"):
        await clients.sdk.generate("x", template_variables={"enable_thinking": True})
