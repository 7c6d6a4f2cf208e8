"""Calls of tools through OpenAI's client and the SDK: forced ones follow their schemas, with drafters and without."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel, Field
from tokenizers import Tokenizer

from outrider.errors import InvalidRequest
from tests.e2e.chat import Clients, chat_clients
from tests.e2e.conftest import MODELS

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOKENIZER = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
TEMPLATE = """{% if tools %}{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}<tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}<assistant>"""


def function(name: str, **properties: Any) -> Any:
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": f"The {name}.", "parameters": parameters}}


TOOLS = [
    function("weather", city={"enum": ["Bern", "Ulm"]}, days={"type": "integer", "minimum": 1, "maximum": 99}),
    function("time", zone={"type": "string", "maxLength": 6}),
]
ASKED: Any = [{"role": "user", "content": "What is the weather in Bern?"}]
# An answer that a model may give of itself, which this one does not:
WRITTEN = r"""start: "I look.\n\n<tool_call>\n" call "\n</tool_call>"
call: "{\"name\": \"time\", \"arguments\": {\"zone\": \"" /[a-z]{1,4}/ "\"}}" """


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def clients(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Clients]:
    folder = tmp_path_factory.mktemp("models") / "target"
    async with chat_clients(folder, TEMPLATE) as both:
        yield both


def arguments_are_valid(name: str, arguments: str) -> None:
    given = json.loads(arguments)
    if name == "weather":
        assert given["city"] in ("Bern", "Ulm")
        assert 1 <= given["days"] <= 99
    else:
        assert name == "time"
        assert len(given["zone"]) <= 6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}], ids=["any", "one"])
async def test_forced_calls_follow_their_schema_and_are_equal_in_a_stream(
    clients: Clients, choice: Any, temperature: float
) -> None:
    terms: Any = {
        "model": "target",
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": temperature,
        "seed": 5,
    }
    asked = clients.openai.chat.completions
    answer = (await asked.create(messages=ASKED, max_tokens=400, **terms)).choices[0]
    plain = (
        await asked.create(messages=ASKED, max_tokens=400, extra_body={"outrider": {"speculation": "off"}}, **terms)
    ).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    calls = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls or ()]
    assert calls
    assert calls == [(call.function.name, call.function.arguments) for call in plain.message.tool_calls or ()]
    for name, arguments in calls:
        arguments_are_valid(name, arguments)
    if choice != "required":
        assert [name for name, _ in calls] == ["time"]
    streamed: list[list[str]] = []
    async with asked.stream(messages=ASKED, max_tokens=400, **terms) as stream:
        async for event in stream:
            if event.type == "chunk":
                for delta in event.chunk.choices[0].delta.tool_calls or ():
                    if delta.index == len(streamed):
                        assert delta.id
                        streamed.append(["", ""])
                    streamed[delta.index][0] += delta.function.name or ""
                    streamed[delta.index][1] += delta.function.arguments or ""
        whole = (await stream.get_final_completion()).choices[0]
    assert [(name, arguments) for name, arguments in streamed] == calls
    assert whole.finish_reason == "tool_calls"


async def test_a_call_that_the_model_makes_by_itself_is_parsed_beside_its_content(clients: Clients) -> None:
    terms: Any = {"model": "target", "tools": TOOLS, "seed": 1, "extra_body": {"guided_grammar": WRITTEN}}
    answer = (await clients.openai.chat.completions.create(messages=ASKED, max_tokens=300, **terms)).choices[0]
    assert answer.message.content == "I look."
    (call,) = answer.message.tool_calls or ()
    arguments_are_valid(call.function.name, call.function.arguments)
    pieces = [
        chunk.choices[0]
        async for chunk in await clients.openai.chat.completions.create(
            messages=ASKED, max_tokens=300, stream=True, **terms
        )
    ]
    assert "".join(piece.delta.content or "" for piece in pieces) == "I look."
    assert pieces[-1].finish_reason == "tool_calls"
    without = (
        await clients.openai.chat.completions.create(messages=ASKED, max_tokens=300, tool_choice="none", **terms)
    ).choices[0]
    assert "<tool_call>" in (without.message.content or "")
    assert not without.message.tool_calls


FORECAST = function("", rain={"type": "integer", "minimum": 1, "maximum": 9})["function"]["parameters"]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": FORECAST}}


@pytest.mark.parametrize("calls", [False, True], ids=["answers", "calls"])
async def test_an_answer_beside_tools_is_a_call_or_json_of_its_schema(clients: Clients, calls: bool) -> None:
    likely = TOKENIZER.encode("<tool_call>" if calls else '{"').ids[0]
    terms: Any = {"model": "target", "tools": TOOLS, "parallel_tool_calls": False, "response_format": FORMAT, "seed": 6}
    terms |= {"messages": ASKED, "max_tokens": 400, "logit_bias": {str(likely): 50}}
    for stream in (False, True):
        if stream:
            async with clients.openai.chat.completions.stream(**terms) as events:
                choice: Any = (await events.get_final_completion()).choices[0]
        else:
            choice = (await clients.openai.chat.completions.create(**terms)).choices[0]
        assert choice.finish_reason == ("tool_calls" if calls else "stop")
        if calls:
            (call,) = choice.message.tool_calls
            assert not choice.message.content
            arguments_are_valid(call.function.name, call.function.arguments)
        else:
            assert not choice.message.tool_calls
            assert 1 <= json.loads(choice.message.content)["rain"] <= 9
    own: Any = {"messages": ASKED, "tools": TOOLS, "schema": FORECAST, "logit_bias": {likely: 50}, "seed": 6}
    drafted, plain = [
        await clients.sdk.generate(**own, parallel_tool_calls=False, max_tokens=400, speculation=speculation)
        for speculation in ("rounds", "off")
    ]
    assert drafted.token_ids == plain.token_ids
    if calls:
        with pytest.raises(ValueError, match="see tool_calls"):
            _ = drafted.parsed
    else:
        assert 1 <= drafted.parsed["rain"] <= 9
    without = await clients.sdk.generate(**own, tool_choice="none", max_tokens=400)
    assert 1 <= without.parsed["rain"] <= 9


async def test_a_call_cut_off_by_max_tokens_is_content(clients: Clients) -> None:
    terms: Any = {"tools": TOOLS[1:], "tool_choice": "required", "parallel_tool_calls": False, "seed": 1}
    whole = await clients.sdk.generate(messages=ASKED, max_tokens=400, **terms)
    cut = await clients.sdk.generate(messages=ASKED, max_tokens=whole.usage.completion_tokens // 2, **terms)
    (call,) = whole.tool_calls
    assert call.name == "time"
    assert whole.content == ""
    assert cut.finish_reason == "length"
    assert whole.text.startswith(cut.text)
    assert not cut.tool_calls
    assert cut.content.startswith('{"name": "time"')


async def test_a_conversation_continues_after_the_tools_result(clients: Clients) -> None:
    asked = clients.openai.chat.completions
    terms: Any = {"model": "target", "tools": TOOLS, "parallel_tool_calls": False, "seed": 2}
    first = (await asked.create(messages=ASKED, tool_choice="required", max_tokens=400, **terms)).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": '{"sun": true}'} for call in first.tool_calls or ()]
    second = await asked.create(messages=[*ASKED, first.model_dump(), *results], max_tokens=5, **terms)
    assert second.usage is not None
    assert second.usage.completion_tokens == 5


@pytest.mark.parametrize(
    ("terms", "problem"),
    [
        ({"tools": [{"type": "function", "function": {}}]}, r"tools\[0\]"),
        ({"tools": TOOLS + TOOLS}, "names that differ"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "none of the tools"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": TOOLS, "tool_choice": "required", "extra_body": {"guided_regex": "a"}}, "do not go with a grammar"),
        (
            {"tools": [function("a", x={"$ref": "#/nope"})], "tool_choice": "required"},
            "grammar",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}, {"role": "user"}]}, "content"),
    ],
)
async def test_malformed_tools_in_a_request_are_refused_by_name(clients: Clients, terms: Any, problem: str) -> None:
    with pytest.raises(openai.BadRequestError, match=problem):
        await clients.openai.chat.completions.create(**{"model": "target", "messages": ASKED, "max_tokens": 5} | terms)


async def test_tools_without_messages_are_refused(clients: Clients) -> None:
    with pytest.raises(InvalidRequest, match="are for messages"):
        await clients.sdk.generate("x", tools=TOOLS)


class Forecast(BaseModel):
    """The weather that is asked for."""

    city: Literal["Bern", "Ulm"]
    days: Annotated[int, Field(ge=1, le=99)]


async def test_openai_parses_answers_and_calls_into_objects(clients: Clients) -> None:
    """Asynchronously, streamed, and by the synchronous client, whose types validate each answer."""
    terms: Any = {"model": "target", "messages": ASKED, "max_tokens": 200, "temperature": 0, "seed": 1}
    asked = clients.openai.chat.completions
    whole = (await asked.parse(response_format=Forecast, **terms)).choices[0].message.parsed
    assert isinstance(whole, Forecast)
    async with asked.stream(response_format=Forecast, **terms) as stream:
        kinds = {event.type async for event in stream}
        streamed = (await stream.get_final_completion()).choices[0].message.parsed
    assert {"content.delta", "content.done"} <= kinds
    assert streamed == whole

    def called() -> Any:
        with openai.OpenAI(base_url=str(clients.openai.base_url), api_key="unused", max_retries=0) as theirs:
            parse = theirs.chat.completions.parse
            assert parse(response_format=Forecast, **terms).choices[0].message.parsed == whole
            tools: Any = {"tools": [openai.pydantic_function_tool(Forecast)], "tool_choice": "required"}
            return parse(parallel_tool_calls=False, **tools, **terms).choices[0].message.tool_calls

    (call,) = await asyncio.to_thread(called)
    assert isinstance(call.function.parsed_arguments, Forecast)
