"""OpenAI's Responses API as OpenAI's own client sees it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from outrider.gateway import respond
from outrider.store.api_keys import Keys
from tests.gateway.conftest import GatewayHarness, gateway_harness
from tests.gateway.scripted import CALL, SAID, prompt_of, writing
from tests.router.fakes import FakeVerifier
from tests.router.rig import ANSWER, MODEL, SCRIPT, until

ZONE = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
TOOLS: Any = [{"type": "function", "name": "time", "description": "The time.", "parameters": ZONE, "strict": False}]
ENCRYPTED = "reasoning.encrypted_content"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


async def streamed(harness: GatewayHarness, **asked: Any) -> tuple[Response, list[Any]]:
    """A streamed response, whose events are those of OpenAI's types, in order."""
    stream = await harness.client.responses.create(stream=True, **asked)
    events = [EVENT.validate_python(event.model_dump(by_alias=True)) async for event in stream]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    return events[-1].response, events


def said(response: Response) -> list[tuple[Any, ...]]:
    """What a response has in it, without ids."""
    items: list[Any] = response.output
    return [
        (item.type, item.status, item.name, item.arguments)
        if item.type == "function_call"
        else (item.type, item.status, *(part.text.strip() for part in item.content))
        for item in items
    ]


async def test_a_response_has_its_reasoning_text_and_calls_whole_and_streamed(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Any = {"model": "target", "input": "What time is it?", "tools": TOOLS, "metadata": {"a": "b"}}
    async with writing(redis_url, tmp_path, SAID, monkeypatch) as harness:
        whole = await harness.client.responses.create(**asked, instructions="Be brief.")
        assert prompt_of(harness).startswith('{"name": "time", "description": "The time.", "parameters": ')
        assert "<system>Be brief.\n<user>What time is it?\n<assistant>" in prompt_of(harness)
        pieces, events = await streamed(harness, **asked, instructions="Be brief.")
    for response in (whole, pieces):
        Response.model_validate(response.model_dump(by_alias=True))
        assert said(response) == [
            ("reasoning", "completed", "Hm, a zone."),
            ("message", "completed", "I look."),
            ("function_call", "completed", "time", '{"zone": "CET"}'),
        ]
        assert (response.status, response.object, response.model) == ("completed", "response", "target")
        assert response.id.startswith("resp_")
        assert (response.instructions, response.metadata, response.store) == ("Be brief.", {"a": "b"}, True)  # type: ignore[attr-defined]
        assert response.usage is not None
        assert response.usage.output_tokens == len(harness.verifier.script)
        mark = MODEL.tokenizer.encode(SAID.partition("</think>")[0] + "</think>", add_special_tokens=False).ids
        assert (
            abs(response.usage.output_tokens_details.reasoning_tokens - len(mark)) <= 1
        )  # a token may go on behind it
        assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert whole.output_text.strip() == "I look."
    deltas = {
        kind: "".join(event.delta for event in events if event.type == f"response.{kind}.delta")
        for kind in ("reasoning_text", "output_text", "function_call_arguments")
    }
    assert deltas == {
        "reasoning_text": "Hm, a zone.",
        "output_text": "I look.",
        "function_call_arguments": '{"zone": "CET"}',
    }
    kinds = [event.type for event in events]
    for begun, ended in (("output_item.added", "output_item.done"), ("content_part.added", "content_part.done")):
        assert kinds.count(f"response.{begun}") == kinds.count(f"response.{ended}") >= 2
    assert kinds[-1] == "response.completed"
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in pieces.output]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_as_codex_sends_it_is_read_back_whole(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    first: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Time?"}]},
    ]
    asked: Any = {
        "model": "target",
        "instructions": "You are Codex.",
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "high", "summary": "auto"},
        "store": False,
        "include": [ENCRYPTED],
        "prompt_cache_key": "k",
    }
    async with writing(redis_url, tmp_path, SAID, monkeypatch) as harness:
        if stream:
            response, _ = await streamed(harness, **asked, input=first)
        else:
            response = await harness.client.responses.create(**asked, input=first)
        reasoning, message, call = (item.model_dump(exclude_none=True) for item in response.output)
        assert reasoning["encrypted_content"]
        del reasoning["content"]  # Codex may send back the other one alone
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "noon"}
        later = {"type": "message", "role": "user", "content": "Thanks."}
        await harness.client.responses.create(**asked, input=[*first, reasoning, message, call, output, later])
        prompt = prompt_of(harness)
    turns = prompt[prompt.index("<system>") :]
    assert turns.startswith(
        "<system>You are Codex.\n\nSandbox.\n<user>Time?\n<assistant><think>Hm, a zone.</think>I look"
    )
    assert f'<call>{call["call_id"]} {{"name": "time", "arguments": {{"zone": "CET"}}}}' in turns
    assert turns.endswith(f"\n<tool>noon{call['call_id']}\n<user>Thanks.\nhigh<assistant>")


async def test_sampling_and_forms_are_the_clusters(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with writing(redis_url, tmp_path, ANSWER, monkeypatch) as harness:
        create: Any = harness.client.responses.create
        asked: Any = {"model": "target", "input": "x", "max_output_tokens": 16}
        await create(**asked, temperature=0.5, top_p=0.9, extra_body={"seed": 3, "outrider": {"top_k": 7}})
        contract = harness.verifier.starts[-1].contract
        assert (contract.temperature, contract.top_p, contract.top_k, contract.seed) == (0.5, 0.9, 7, 3)
        assert contract.max_tokens == 16
        schema = {"type": "json_schema", "name": "n", "schema": {"type": "integer"}, "strict": True}
        for form, text in ((schema, '{"type": "integer"}'), ({"type": "json_object"}, '{"type": "object"}')):
            shown = (await create(**asked, text={"format": form})).text
            assert harness.verifier.starts[-1].contract.grammar.text == text
            assert shown.format.type == form["type"]
        for choice, forced in (("required", True), ({"type": "function", "name": "time"}, True), ("auto", False)):
            assert (await create(**asked, tools=TOOLS, tool_choice=choice)).tool_choice is not None
            assert bool(harness.verifier.starts[-1].contract.grammar.text) is forced
        await create(**asked, tools=TOOLS, tool_choice="none")
        assert '"time"' not in prompt_of(harness)


async def test_a_cut_answer_is_incomplete(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = len(MODEL.tokenizer.encode(CALL, add_special_tokens=False).ids) - 12
    asked: Any = {"model": "target", "input": "x", "tools": TOOLS}
    async with writing(redis_url, tmp_path, CALL, monkeypatch) as harness:
        whole = await harness.client.responses.create(**asked, max_output_tokens=short)
        pieces, events = await streamed(harness, **asked, max_output_tokens=short)
    assert [(item.type, item.status) for item in whole.output] == [("message", "incomplete")]  # type: ignore[union-attr]
    assert [(item.type, item.status) for item in pieces.output] == [("function_call", "incomplete")]  # type: ignore[union-attr]
    assert events[-1].type == "response.incomplete"
    for response in (whole, pieces):
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"max_output_tokens": 99999}, "max_output_tokens: is 99999, must be at most"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "a part of type 'input_image'"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "an item of type 'item_reference'"),
    ({"input": [{"type": "function_call", "call_id": "x", "name": "f"}]}, "needs arguments"),
    ({"input": [{"type": "reasoning", "encrypted_content": "outrider:%"}]}, "encrypted_content: is not as the gateway"),
    ({"tools": [{"type": "web_search"}]}, "a tool of type 'web_search'"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "a choice of type 'allowed_tools'"),
    ({"previous_response_id": "resp_1"}, "previous_response_id: response 'resp_1' is not known"),
    ({"conversation": "conv_1"}, "Unsupported parameter: 'conversation'"),
    ({"background": True}, "Unsupported parameter: 'background'"),
    ({"truncation": "auto"}, "Unsupported parameter: 'truncation'"),
    ({"include": ["message.output_text.logprobs"]}, "include: has message.output_text.logprobs"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "schema: is for the type json_schema"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}}}}, "text: "),
    ({"extra_body": {"nothing": 1}}, "Unrecognized request argument supplied: nothing"),
    ({"input": "x " * 9000}, "input: has"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_continued_with_all_that_it_had(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    asked: Any = {"model": "target", "tools": TOOLS}
    async with writing(redis_url, tmp_path, SAID, monkeypatch) as harness:

        async def respond_to(**more: Any) -> Response:
            if stream:
                return (await streamed(harness, **asked, **more))[0]
            response: Response = await harness.client.responses.create(**asked, **more)
            return response

        first = await respond_to(input="Time?", instructions="Be brief.")
        assert first.store is True  # type: ignore[attr-defined]
        call: Any = first.output[-1]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
        second = await respond_to(input=[output], previous_response_id=first.id, instructions="Be kind.")
        assert second.previous_response_id == first.id
        third = await respond_to(input="Thanks.", previous_response_id=second.id, store=False)
        turns = prompt_of(harness).partition("<tool_call>\n")[2]
        said_once = (
            f'<think>Hm, a zone.</think>I look.<call>{call.call_id} {{"name": "time", "arguments": {{"zone": "CET"}}}}'
        )
        assert turns.startswith(f"<user>Time?\n<assistant>{said_once}\n<tool>noon{call.call_id}\n<assistant><think>")
        assert turns.endswith("\n<user>Thanks.\n<assistant>")
        assert "Be " not in turns  # instructions are those of their request alone
        assert third.store is False  # type: ignore[attr-defined]
        again = await respond_to(input="Thanks.", previous_response_id=first.id, store=False)  # another branch
        assert again.previous_response_id == first.id
        for unknown in (third.id, f"{first.id}x"):
            with pytest.raises(openai.BadRequestError) as refused:
                await respond_to(input="x", previous_response_id=unknown)
            assert refused.value.param == "previous_response_id"
        async with httpx.AsyncClient(base_url=harness.url) as web:
            body = '{"model": "target", "input": "x", "\\u0070revious_response_id": "' + first.id + '"}'
            hidden = await web.post("/v1/responses", content=body, headers={"content-type": "application/json"})
        assert "without escapes" in hidden.json()["error"]["message"]  # it is not answered without its beginning


async def test_a_response_is_its_tenants_alone_and_expires(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with writing(redis_url, tmp_path, ANSWER, monkeypatch) as first:
        assert first.url
    models, script = {"target": tmp_path / "model"}, FakeVerifier(SCRIPT)
    kept: dict[str, Any] = {"auth": "keys", "session_ttl_s": 2.0, "models": models}
    async with gateway_harness(redis_url, script, **kept) as harness:
        one, two = [(await Keys(harness.rig.client).add(name))[0] for name in ("one", "two")]
        asked: Any = {"model": "target", "input": "x", "max_output_tokens": 16}
        mine, theirs = (harness.client.with_options(api_key=key) for key in (one, two))
        response = await mine.responses.create(**asked)
        with pytest.raises(openai.BadRequestError, match="is not known"):
            await theirs.responses.create(**asked, previous_response_id=response.id)
        await mine.responses.create(**asked, previous_response_id=response.id)
        await asyncio.sleep(2.1)
        with pytest.raises(openai.BadRequestError, match="may have expired"):
            await mine.responses.create(**asked, previous_response_id=response.id)


async def test_a_response_that_cannot_be_kept_says_so_and_is_whole(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with writing(redis_url, tmp_path, ANSWER, monkeypatch) as first:
        assert first.url
    models, script = {"target": tmp_path / "model"}, FakeVerifier(SCRIPT)
    async with gateway_harness(redis_url, script, models=models, tenant_stored_sessions=1) as harness:
        asked: Any = {"model": "target", "input": "x", "max_output_tokens": 16}
        whole = await harness.client.responses.create(**asked)
    assert whole.store is False  # type: ignore[attr-defined]
    assert whole.output_text


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_not_served_is_refused_by_name(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async with writing(redis_url, tmp_path, ANSWER, monkeypatch) as harness:
        for wrong, fragment in REFUSED:
            asked: Any = {"model": "target", "input": "x", "stream": stream, **wrong}
            with pytest.raises(openai.BadRequestError) as refused:
                await harness.client.responses.create(**asked)
            assert fragment in refused.value.message, wrong
    assert harness.verifier.starts == []


async def test_reasoning_of_another_service_is_left_out(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign: Any = [{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}]
    async with writing(redis_url, tmp_path, ANSWER, monkeypatch) as harness:
        last: Any = [{"role": "user", "content": "x"}]
        await harness.client.responses.create(model="target", input=[*foreign, *last], max_output_tokens=16)
        assert prompt_of(harness) == "<user>x\n<assistant>"


async def test_an_error_in_a_stream_is_a_failed_response(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with writing(redis_url, tmp_path, ANSWER, monkeypatch) as first:  # its folder has the template
        assert first.url
    monkeypatch.setattr(respond, "HEADERS_S", 0.1)
    limits = {"keep_alive_s": 0.2, "timeout_s": 1.0}
    models = {"target": tmp_path / "model"}
    verifier = FakeVerifier(SCRIPT, pace_s=0.3)
    async with gateway_harness(redis_url, verifier, gateway=limits, models=models) as harness:
        response, events = await streamed(harness, model="target", input="x", max_output_tokens=40)
        async with (
            httpx.AsyncClient(base_url=harness.url) as web,
            web.stream("POST", "/v1/responses", json={"model": "target", "input": "x", "stream": True}) as answer,
        ):
            lines = [line async for line in answer.aiter_lines() if line]
    assert events[-1].type == "response.failed"
    assert response.status == "failed"
    assert response.error is not None
    assert response.error.code == "server_error"
    assert ": keep-alive" in lines
    assert lines[-2] == "event: response.failed"


async def test_a_streamed_response_counts_what_it_holds(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with writing(redis_url, tmp_path, ANSWER * 30, monkeypatch) as first:
        assert first.url
    held = {"max_request_bytes": 64, "max_total_bytes": 64}  # answers may hold four times that
    verifier = FakeVerifier(MODEL.tokenizer.encode(ANSWER * 30).ids)
    models = {"target": tmp_path / "model"}
    async with gateway_harness(redis_url, verifier, gateway=held, models=models) as harness:
        response, _ = await streamed(harness, model="target", input="x")
    assert response.error is not None
    assert response.error.code == "rate_limit_exceeded"


async def test_a_client_that_leaves_stops_the_verifier(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with writing(redis_url, tmp_path, ANSWER * 9, monkeypatch, pace_s=0.05) as harness:
        for stream in (False, True):
            create: Any = harness.client.responses.create

            async def read(stream: bool = stream, create: Any = create) -> None:
                answer = await create(model="target", input="x", stream=stream)
                if stream:
                    async for _ in answer:
                        pass

            asking = asyncio.create_task(read())
            await until(lambda: harness.verifier.open == 1)
            asking.cancel()
            await until(lambda: harness.verifier.open == 0)
