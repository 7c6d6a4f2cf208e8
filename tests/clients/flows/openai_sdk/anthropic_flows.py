"""anthropic."""

import anthropic
import pytest
from conftest import CITIES, MODEL, QUESTION, SCHEMA, TOKENS, URLS

ASKED = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0}
TOOLS = [{"name": "weather", "description": "The weather.", "input_schema": SCHEMA}]


def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0)


def test_messages_and_their_usage(same) -> None:
    def ask(url: str) -> tuple[str, str, int]:
        answer = client(url).messages.create(
            model=MODEL, messages=ASKED, system="Be brief.", max_tokens=TOKENS, extra_body=GREEDY
        )
        return answer.content[0].text, answer.stop_reason, answer.usage.output_tokens

    assert same(ask)[1:] == ("max_tokens", TOKENS)


def test_messages_are_streamed(same) -> None:
    def ask(url: str) -> str:
        with client(url).messages.stream(model=MODEL, messages=ASKED, max_tokens=TOKENS, extra_body=GREEDY) as stream:
            text = "".join(stream.text_stream)
            assert stream.get_final_message().content[0].text == text
            return text

    assert same(ask)


def test_a_forced_tool_is_used_and_its_result_taken_back(same) -> None:
    def ask(url: str) -> dict:
        asked = {"model": MODEL, "max_tokens": 200, "extra_body": GREEDY, "tools": TOOLS}
        first = client(url).messages.create(messages=ASKED, tool_choice={"type": "tool", "name": "weather"}, **asked)
        (used,) = [block for block in first.content if block.type == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": used.id, "content": "sunny"}
        further = [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        assert client(url).messages.create(messages=[*ASKED, *further], **asked).content
        return used.input

    assert same(ask)["city"] in CITIES


def test_tokens_are_counted_as_an_answer_counts_them(same) -> None:
    def ask(url: str) -> int:
        counted = client(url).messages.count_tokens(model=MODEL, messages=ASKED, tools=TOOLS).input_tokens
        answer = client(url).messages.create(model=MODEL, messages=ASKED, tools=TOOLS, max_tokens=1)
        assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == counted
        return counted

    assert same(ask) > 0


def test_a_wrong_request_raises_what_users_know() -> None:
    with pytest.raises(anthropic.NotFoundError):
        client(URLS[0]).messages.create(model="nobody", messages=ASKED, max_tokens=1)
