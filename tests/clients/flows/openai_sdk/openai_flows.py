"""openai, sync and async."""

import json
from typing import Literal

import openai
import pytest
from conftest import CITIES, MODEL, QUESTION, SCHEMA, TOKENS, URLS
from pydantic import BaseModel, ConfigDict, Field

ASKED = [{"role": "user", "content": QUESTION}]
CHOSEN = {"model": MODEL, "seed": 5, "temperature": 1.0}


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Bern", "Ulm"]
    days: int = Field(ge=1, le=99)


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


def test_the_model_is_listed(same) -> None:
    assert same(lambda url: [model.id for model in client(url).models.list()]) == [MODEL]


@pytest.mark.parametrize("stream", [False, True])
def test_completions(same, stream: bool) -> None:
    def ask(url: str) -> str:
        answer = client(url).completions.create(**CHOSEN, prompt="def add(a, b):", max_tokens=TOKENS, stream=stream)
        return "".join(part.choices[0].text for part in answer) if stream else answer.choices[0].text

    assert same(ask)


@pytest.mark.parametrize("stream", [False, True])
def test_chats_and_their_usage(same, stream: bool) -> None:
    def ask(url: str) -> tuple[str, int, int]:
        more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = client(url).chat.completions.create(**CHOSEN, messages=ASKED, max_tokens=TOKENS, **more)
        if not stream:
            return answer.choices[0].message.content, answer.usage.prompt_tokens, answer.usage.completion_tokens
        parts = list(answer)
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        return text, parts[-1].usage.prompt_tokens, parts[-1].usage.completion_tokens

    assert same(ask)[2] == TOKENS


def test_drafts_are_accepted_where_there_is_a_drafter() -> None:
    def accepted(url: str, seed: int) -> int:
        answer = client(url).chat.completions.create(**{**CHOSEN, "seed": seed}, messages=ASKED, max_tokens=100)
        return answer.usage.completion_tokens_details.accepted_prediction_tokens

    drafted, plain = (sum(accepted(url, seed) for seed in range(5)) for url in URLS)
    assert drafted > 0 == plain


def test_a_forced_call_follows_its_schema_and_its_result_is_taken_back(same) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]

    def ask(url: str) -> tuple[str, str]:
        asked = client(url).chat.completions
        first = asked.create(**CHOSEN, messages=ASKED, tools=tools, tool_choice="required", parallel_tool_calls=False)
        message = first.choices[0].message
        call = message.tool_calls[0]
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        second = asked.create(**CHOSEN, messages=[*ASKED, message, result], tools=tools, max_tokens=TOKENS)
        return call.function.arguments, second.choices[0].message.content

    arguments, _ = same(ask)
    assert json.loads(arguments)["city"] in CITIES


def test_an_answer_is_parsed_into_a_model(same) -> None:
    def ask(url: str) -> Weather:
        parsed = client(url).chat.completions.parse(**CHOSEN, messages=ASKED, response_format=Weather, max_tokens=80)
        return parsed.choices[0].message.parsed

    assert same(ask).city in CITIES


def test_responses_are_streamed_and_continued(same) -> None:
    def ask(url: str) -> tuple[str, str]:
        responses = client(url).responses
        with responses.stream(model=MODEL, input=QUESTION, temperature=0.0, max_output_tokens=TOKENS) as stream:
            events = list(stream)
        assert events[0].type == "response.created"
        assert events[-1].type == "response.incomplete"  # after TOKENS
        first = events[-1].response
        second = responses.create(
            model=MODEL, input="And in Ulm?", temperature=0.0, max_output_tokens=TOKENS, previous_response_id=first.id
        )
        return first.output_text, second.output_text

    assert all(same(ask))


def test_a_wrong_request_raises_what_users_know() -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as refused:
        client(URLS[0]).chat.completions.create(model=MODEL, messages=ASKED, temperature=9)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client(URLS[0]).chat.completions.create(model="nobody", messages=ASKED)


async def test_the_asynchronous_client_streams() -> None:
    async with openai.AsyncOpenAI(base_url=f"{URLS[0]}/v1", api_key="unused") as ours:
        stream = await ours.chat.completions.create(**CHOSEN, messages=ASKED, max_tokens=TOKENS, stream=True)
        assert [part async for part in stream][-1].choices[0].finish_reason == "length"
