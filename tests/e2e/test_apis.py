"""One request through each API of the gateway has one answer, with drafters and without."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
import pytest_asyncio

from tests.e2e.chat import Clients, chat_clients
from tests.e2e.test_tools import TEMPLATE, TOOLS

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASKED: Any = [{"role": "user", "content": "What is the weather in Bern?"}]
FUNCTIONS = [tool["function"] for tool in TOOLS]
OF_MESSAGES = [
    {"name": it["name"], "description": it["description"], "input_schema": it["parameters"]} for it in FUNCTIONS
]
OF_RESPONSES = [{"type": "function", **function} for function in FUNCTIONS]
OFF = {"outrider": {"speculation": "off"}}


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def clients(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Clients]:
    async with chat_clients(tmp_path_factory.mktemp("models") / "target", TEMPLATE) as both:
        yield both


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def claude(clients: Clients) -> AsyncIterator[anthropic.AsyncAnthropic]:
    url = str(clients.openai.base_url).removesuffix("/v1/")
    async with anthropic.AsyncAnthropic(base_url=url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_text_is_the_same_through_every_api(
    clients: Clients, claude: anthropic.AsyncAnthropic, temperature: float
) -> None:
    chosen = {"seed": 5, "temperature": temperature}
    for more in ({}, OFF):
        extra: Any = {"extra_body": {**chosen, **more}}
        chat = await clients.openai.chat.completions.create(model="target", messages=ASKED, max_tokens=60, **extra)
        message = await claude.messages.create(model="target", messages=ASKED, max_tokens=60, **extra)
        response = await clients.openai.responses.create(model="target", input=ASKED, max_output_tokens=60, **extra)
        async with claude.messages.stream(model="target", messages=ASKED, max_tokens=60, **extra) as stream:
            streamed = "".join([text async for text in stream.text_stream])
        texts = {chat.choices[0].message.content, message.content[0].text, response.output_text, streamed}  # type: ignore[union-attr]
        assert len(texts) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_forced_calls_are_the_same_through_every_api(
    clients: Clients, claude: anthropic.AsyncAnthropic, stream: bool
) -> None:
    for more in ({}, OFF):
        extra: Any = {"extra_body": {"seed": 5, **more}}
        chat = await clients.openai.chat.completions.create(
            model="target",
            messages=ASKED,
            max_tokens=400,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            **extra,
        )
        asked: Any = {"model": "target", "messages": ASKED, "max_tokens": 400, "tools": OF_MESSAGES, **extra}
        asked["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
        if stream:
            async with claude.messages.stream(**asked) as running:
                message = await running.get_final_message()
        else:
            message = await claude.messages.create(**asked)
        wanted: Any = {"model": "target", "input": ASKED, "max_output_tokens": 400, "tools": OF_RESPONSES, **extra}
        wanted |= {"tool_choice": "required", "parallel_tool_calls": False}
        if stream:
            events = [event async for event in await clients.openai.responses.create(stream=True, **wanted)]
            response = events[-1].response
        else:
            response = await clients.openai.responses.create(**wanted)
        (made,) = chat.choices[0].message.tool_calls or ()
        (used,) = message.content
        (called,) = response.output
        assert made.type == "function"
        assert used.type == "tool_use"
        assert message.stop_reason == "tool_use"
        assert (used.name, used.input) == (made.function.name, json.loads(made.function.arguments))
        assert (called.name, called.arguments) == (made.function.name, made.function.arguments)
