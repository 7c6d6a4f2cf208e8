"""langchain-openai and langchain-anthropic."""

import pytest
from conftest import CITIES, MODEL, QUESTION, SCHEMA, TOKENS
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI


def chat(url: str, **more) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{url}/v1", api_key="unused", model=MODEL, temperature=0, **more)


def test_a_chat_is_answered_and_streamed(same) -> None:
    def ask(url: str) -> str:
        whole = chat(url, max_tokens=TOKENS).invoke(QUESTION).content
        assert "".join(part.content for part in chat(url, max_tokens=TOKENS).stream(QUESTION)) == whole
        return whole

    assert same(ask)


def test_a_forced_tool_is_called(same) -> None:
    schema = {"title": "weather", "description": "The weather.", **SCHEMA}

    def ask(url: str) -> dict:
        (call,) = (
            chat(url).bind_tools([schema], tool_choice="any", parallel_tool_calls=False).invoke(QUESTION).tool_calls
        )
        return call["args"]

    assert same(ask)["city"] in CITIES


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_has_the_structure_that_was_asked_for(same, method: str) -> None:
    schema = {"title": "weather", "description": "The weather.", **SCHEMA}
    assert same(lambda url: chat(url).with_structured_output(schema, method=method).invoke(QUESTION))["city"] in CITIES


def test_its_responses_are_answered(same) -> None:
    assert same(lambda url: chat(url, max_tokens=TOKENS, use_responses_api=True).invoke(QUESTION).text)


def test_messages_are_answered(same) -> None:
    def ask(url: str) -> str:
        return (
            ChatAnthropic(base_url=url, api_key="unused", model=MODEL, temperature=0, max_tokens=TOKENS)
            .invoke(QUESTION)
            .text
        )

    assert same(ask)
