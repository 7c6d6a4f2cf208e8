"""The gateway as Anthropic's own client sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message

from outrider.gateway import respond
from outrider.store.api_keys import Keys
from tests.gateway.conftest import GatewayHarness, gateway_harness
from tests.gateway.scripted import CALL, SAID, prompt_of, writing
from tests.router.fakes import FakeVerifier
from tests.router.rig import ANSWER, MODEL, SCRIPT

ASKED: Any = [{"role": "user", "content": "What time is it?"}]
ZONE = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
CACHED = {"cache_control": {"type": "ephemeral"}}
TOOLS: Any = [{"name": "time", "description": "The time.", "input_schema": ZONE, **CACHED}]


@asynccontextmanager
async def claude(harness: GatewayHarness, key: str = "unused") -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=harness.url, api_key=key, max_retries=0) as client:
        yield client


def valid(message: Message) -> Message:
    """The message, by the types of Anthropic's package in every field."""
    return Message.model_validate(message.model_dump(warnings="error"), strict=True)


async def streamed(client: anthropic.AsyncAnthropic, **asked: Any) -> tuple[Message, list[Any]]:
    async with client.messages.stream(**asked) as stream:
        events = [event async for event in stream]
        return await stream.get_final_message(), events


async def test_an_answer_has_its_thinking_text_and_calls_whole_and_streamed(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Any = {"model": "target", "messages": ASKED, "max_tokens": 400, "tools": TOOLS}
    async with writing(redis_url, tmp_path, SAID, monkeypatch) as harness, claude(harness) as client:
        whole = valid(await client.messages.create(**asked))
        pieces, events = await streamed(client, **asked)
        again = [*ASKED, {"role": "assistant", "content": whole.content}]
        call: Any = whole.content[-1]
        result = [{"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "noon"}]}]
        await client.messages.create(**{**asked, "messages": [*again, {"role": "user", "content": result}]})
        prompt = prompt_of(harness)
    for message in (whole, valid(pieces)):
        thinking, text, used = message.content
        assert (thinking.type, text.type, used.type) == ("thinking", "text", "tool_use")
        assert (thinking.thinking, text.text.strip()) == ("Hm, a zone.", "I look.")
        assert (used.name, used.input) == ("time", {"zone": "CET"})
        assert used.id.startswith("toolu_")
        assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
        assert message.usage.output_tokens == len(harness.verifier.script)
        assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) > 50
    assert pieces.content[1].text.strip() == "I look."  # type: ignore[union-attr]
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    assert "<assistant><think>Hm, a zone.</think>I look." in prompt
    assert f"<call>{call.id} " in prompt
    assert f"<tool>noon{call.id}" in prompt


async def test_system_messages_and_switches_reach_the_template(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Any = {"model": "target", "max_tokens": 3}
    system: Any = [{"type": "text", "text": "Be ", **CACHED}, {"type": "text", "text": "brief."}]
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    async with writing(redis_url, tmp_path, ANSWER, monkeypatch) as harness, claude(harness) as client:
        await client.messages.create(messages=ASKED, system=system, thinking={"type": "disabled"}, **asked)  # type: ignore[arg-type]
        assert prompt_of(harness) == "<system>Be brief.\n<user>What time is it?\nFalse<assistant>"
        await client.beta.messages.create(
            messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            thinking={"type": "enabled", "budget_tokens": 1024},
            output_config={"effort": "high"},
            betas=["context-management-2025-06-27"],
            context_management=edits,  # type: ignore[arg-type]
            metadata={"user_id": "x"},
            **asked,
        )
        assert prompt_of(harness) == "<user>ab\nTruehigh<assistant>"


async def test_sampling_and_forms_are_the_clusters(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with writing(redis_url, tmp_path, ANSWER, monkeypatch) as harness, claude(harness) as client:
        create: Any = client.messages.create
        asked: Any = {"model": "target", "messages": ASKED, "max_tokens": 3}
        sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7}  # the newest client has no arguments for these
        await create(**asked, extra_body={**sampling, "seed": 3, "outrider": {"min_p": 0.1}})
        contract = harness.verifier.starts[-1].contract
        assert (contract.temperature, contract.top_p, contract.top_k, contract.min_p) == (0.5, 0.9, 7, 0.1)
        assert (contract.seed, contract.max_tokens) == (3, 3)
        schema = {"format": {"type": "json_schema", "schema": {"type": "integer"}}}
        await create(**asked, output_config=schema)
        assert harness.verifier.starts[-1].contract.grammar.text == '{"type": "integer"}'
        choices = ({"type": "any"}, True), ({"type": "tool", "name": "time"}, True), ({"type": "auto"}, False)
        for choice, forced in choices:
            await create(**asked, tools=TOOLS, tool_choice={**choice, "disable_parallel_tool_use": True})
            assert bool(harness.verifier.starts[-1].contract.grammar.text) is forced
        await create(**asked, tools=TOOLS, tool_choice={"type": "none"})
        assert '"time"' not in prompt_of(harness)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_sequence_is_named(harness_of: GatewayHarness, stream: bool) -> None:
    async with claude(harness_of) as client:
        asked: Any = {"model": "target", "messages": ASKED, "max_tokens": 40, "stop_sequences": ["nothing", "return"]}
        message = (await streamed(client, **asked))[0] if stream else await client.messages.create(**asked)
        cut = await client.messages.create(model="target", messages=ASKED, max_tokens=2)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "return")
    assert message.content[0].text == ANSWER.partition("return")[0]  # type: ignore[union-attr]
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)


@pytest.fixture
async def harness_of(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GatewayHarness]:
    async with writing(redis_url, tmp_path, ANSWER, monkeypatch) as running:
        yield running


async def test_a_call_that_is_cut_is_text_and_in_a_stream_a_block_that_ends(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = len(MODEL.tokenizer.encode(CALL, add_special_tokens=False).ids) - 12
    asked: Any = {"model": "target", "messages": ASKED, "max_tokens": short, "tools": TOOLS}
    async with writing(redis_url, tmp_path, CALL, monkeypatch) as harness, claude(harness) as client:
        whole = await client.messages.create(**asked)
        pieces, events = await streamed(client, **asked)
    assert [block.type for block in whole.content] == ["text"]
    assert whole.stop_reason == pieces.stop_reason == "max_tokens"
    assert [event.type for event in events].count("content_block_stop") == len(pieces.content)


async def test_thinking_may_be_left_out(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Any = {"model": "target", "messages": ASKED, "max_tokens": 400}
    hidden: Any = {"type": "adaptive", "display": "omitted"}
    async with writing(redis_url, tmp_path, SAID, monkeypatch) as harness, claude(harness) as client:
        whole = await client.messages.create(**asked, thinking=hidden)
        messages = [whole, (await streamed(client, **asked, thinking=hidden))[0]]
    for message in messages:
        thinking, text = message.content
        assert (thinking.type, thinking.thinking, bool(thinking.signature)) == ("thinking", "", True)  # type: ignore[union-attr]
        assert text.type == "text"


def user(block: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [block]}]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 9999}, "max_tokens: is 9999, must be at most"),
    ({"messages": [*ASKED, {"role": "assistant", "content": "It is"}]}, "messages: end with one of the assistant"),
    (user({"type": "image", "source": {}}), "has a block of type 'image'"),
    (user({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}), "models here read text only"),
    (user({"type": "tool_use", "id": "a", "name": "b", "input": {}}), "has no block of type tool_use"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "a tool of type 'web_search_20250305'"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "name: is for the type tool"),
    ({"extra_body": {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}}, "clear_tool_uses"),
    ({"extra_body": {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}}, "clear_thinking"),
    ({"extra_body": {"mcp_servers": [{"name": "x"}]}}, "mcp_servers"),
    ({"extra_body": {"container": "x"}}, "container"),
    ({"extra_body": {"nothing": "x"}}, "Unrecognized request argument supplied: nothing"),
    ({"extra_body": {"top_k": 3, "outrider": {"top_k": 4}}}, "top_k: is in outrider, too"),
    ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "task_budget"),
    ({"tools": TOOLS, "messages": [{"role": "user", "content": "x " * 9000}]}, "messages: has"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_not_served_is_refused_by_name_in_anthropics_shape(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async with writing(redis_url, tmp_path, ANSWER, monkeypatch) as harness, claude(harness) as client:
        for wrong, fragment in REFUSED:
            asked: Any = {"model": "target", "messages": ASKED, "max_tokens": 3, "stream": stream, **wrong}
            with pytest.raises(anthropic.BadRequestError) as refused:
                await client.messages.create(**asked)
            body: Any = refused.value.body
            assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
            assert fragment in body["error"]["message"], wrong
            assert body["request_id"] == refused.value.request_id
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(model="claude", messages=ASKED, max_tokens=3, stream=stream)
        assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert harness.verifier.starts == []


async def test_x_api_key_is_a_key_and_a_wrong_one_is_refused_in_anthropics_shape(redis_url: str) -> None:

    async with gateway_harness(redis_url, auth="keys") as harness:
        secret, _ = await Keys(harness.rig.client).add("tenant")
        async with claude(harness, secret) as client:
            with pytest.raises(anthropic.BadRequestError, match="no chat template"):
                await client.messages.create(model="target", messages=ASKED, max_tokens=3)
        async with claude(harness, "sk-wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await client.messages.create(model="target", messages=ASKED, max_tokens=3)
        assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        async with httpx.AsyncClient(base_url=harness.url) as web:
            bearer = await web.post("/v1/messages/count_tokens", json={}, headers={"authorization": f"Bearer {secret}"})
        assert bearer.status_code == 400


async def test_a_stream_that_waits_has_pings_and_an_error_in_it_is_an_event(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(respond, "HEADERS_S", 0.1)
    verifier = FakeVerifier(SCRIPT, pace_s=5.0)
    asked = {"model": "target", "messages": ASKED, "max_tokens": 3, "stream": True}
    async with writing(redis_url, tmp_path, ANSWER, monkeypatch) as first:  # its folder has the template
        assert first.url
    limits = {"keep_alive_s": 0.2, "timeout_s": 1.0}
    async with (
        gateway_harness(redis_url, verifier, gateway=limits, models={"target": tmp_path / "model"}) as harness,
        httpx.AsyncClient(base_url=harness.url) as web,
        web.stream("POST", "/v1/messages", json=asked) as answer,
    ):
        lines = [line async for line in answer.aiter_lines() if line]
        async with claude(harness) as client:
            with pytest.raises(anthropic.APIStatusError) as failed:
                await streamed(client, model="target", messages=ASKED, max_tokens=3)
    assert lines[:2] == ["event: ping", 'data: {"type": "ping"}']
    assert lines.count("event: ping") >= 2
    assert lines[-2] == "event: error"
    assert '"timeout_error"' in lines[-1]
    assert failed.value.body["error"]["type"] == "timeout_error"  # type: ignore[index]


async def test_tokens_are_counted_exactly_as_the_prompt_has_them(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Any = {"model": "target", "messages": ASKED, "system": "Be brief.", "tools": TOOLS}
    async with writing(redis_url, tmp_path, ANSWER, monkeypatch) as harness, claude(harness) as client:
        for more in ({}, {"tool_choice": {"type": "none"}}, {"thinking": {"type": "disabled"}}):
            counted = await client.messages.count_tokens(**asked, **more)
            message = await client.messages.create(**asked, **more, max_tokens=1)
            usage = message.usage
            assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        assert len(harness.verifier.starts) == 3
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.count_tokens(model="target", messages=[{"role": "user", "content": "x " * 9000}])
        assert "messages: has" in refused.value.body["error"]["message"]  # type: ignore[index]
        assert harness.metrics.requests[("/v1/messages/count_tokens", "200")] == 3
