"""Every field of every endpoint, from the table that docs/gateway.md is made of: served, without effect, or refused."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from docs.hooks.gateway_fields import NO_EFFECT, REFUSED, SERVED, state
from outrider.gateway.apis.messages import MessagesBody
from outrider.gateway.apis.responses import ResponsesBody
from outrider.gateway.schema import AnswerRequest, Chat, Completion
from tests.gateway.conftest import GatewayHarness, gateway_harness
from tests.gateway.scripted import TEMPLATE
from tests.router.rig import FOLDER

ASKED = [{"role": "user", "content": "x"}]
ENDPOINTS: dict[str, tuple[type[AnswerRequest], dict[str, Any]]] = {
    "/v1/completions": (Completion, {"model": "target", "prompt": "x", "max_tokens": 2}),
    "/v1/chat/completions": (Chat, {"model": "target", "messages": ASKED, "max_completion_tokens": 2}),
    "/v1/messages": (MessagesBody, {"model": "target", "messages": ASKED, "max_tokens": 2}),
    "/v1/responses": (ResponsesBody, {"model": "target", "input": "x", "max_output_tokens": 2}),
}
SCHEMA = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
NAMED = {"type": "json_schema", "name": "n", "schema": SCHEMA}
TOOLS = {
    "/v1/chat/completions": [{"type": "function", "function": FUNCTION}],
    "/v1/messages": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
    "/v1/responses": [{"type": "function", **FUNCTION}],
}
VALUES: dict[str, Any] = {  # one of each field that is served, besides those that every request has
    "add_special_tokens": True,
    "add_generation_prompt": True,
    "chat_template": "{{ messages[0].content }}!",
    "chat_template_kwargs": {"enable_thinking": False},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "continue_final_message": False,
    "echo": True,
    "frequency_penalty": 0.5,
    "guided_choice": ["a", "b"],
    "guided_grammar": 'start: "a"',
    "guided_json": SCHEMA,
    "guided_regex": "a+",
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "include": ["reasoning.encrypted_content"],
    "instructions": "Be brief.",
    "logit_bias": {"5": 1.0},
    "max_tokens": None,  # the older name of max_completion_tokens
    "metadata": {"a": "b"},
    "min_p": 0.1,
    "min_tokens": 1,
    "modalities": ["text"],
    "n": 2,
    "outrider": {"depth": 2},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "output_format": {"type": "json_schema", "schema": SCHEMA},
    "parallel_tool_calls": False,
    "presence_penalty": 0.5,
    "priority": 1,
    "prompt_logprobs": 1,
    "reasoning": {"effort": "high"},
    "reasoning_effort": "high",
    "repeat_penalty": 1.2,
    "repetition_penalty": 1.2,
    "response_format": {"type": "json_object"},
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "seed": 3,
    "skip_special_tokens": False,
    "stop": ["zebra"],
    "stop_sequences": ["zebra"],
    "stop_token_ids": [9],
    "store": False,
    "stream_options": {"include_usage": True},
    "structured_outputs": {"regex": "a+"},
    "system": "Be brief.",
    "temperature": 0.5,
    "text": {"format": NAMED},
    "thinking": {"type": "disabled"},
    "top_k": 5,
    "truncate_prompt_tokens": 4,
    "top_logprobs": 2,
    "top_p": 0.5,
}
BESIDE = {  # what else a request with the field needs
    "best_of": {"n": 2},
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
}
ELSEWHERE = {
    "previous_response_id",
    "stream",
}  # tests/gateway/test_responses.py; every field here is asked for both ways
WHOLE = {"prompt_logprobs"}  # refused in a stream


def value(path: str, name: str) -> dict[str, Any]:
    """The field with a value that is served, and what it needs."""
    tools = {"tools": TOOLS.get(path)}
    if name in ("tools", "parallel_tool_calls", "tool_choice"):
        choice = {"type": "auto"} if path == "/v1/messages" else "auto"
        return {**tools, name: {"tools": TOOLS.get(path), "tool_choice": choice}.get(name, VALUES.get(name))}
    own = {"logprobs": True if "chat" in path else 2, "best_of": 2}
    return {name: own[name] if name in own else VALUES[name], **BESIDE.get(name, {})}


@pytest.fixture
async def gateway(redis_url: str, tmp_path: Path) -> AsyncIterator[GatewayHarness]:
    shutil.copytree(FOLDER, tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(TEMPLATE)
    async with gateway_harness(redis_url, models={"target": tmp_path / "chat"}) as running:
        yield running


class Caller:
    """Sends bodies to one endpoint."""

    def __init__(self, gateway: GatewayHarness, web: httpx.AsyncClient, path: str) -> None:
        self.path = path
        self.kind, self.least = ENDPOINTS[path]
        self._gateway, self._web = gateway, web

    def fields(self, what: str) -> list[str]:
        return [name for name in self.kind.model_fields if state(self.kind, name) == what and name not in self.least]

    async def send(self, fields: dict[str, Any]) -> httpx.Response:
        return await self._web.post(self.path, json={**self.least, **fields})

    async def asked(self, fields: dict[str, Any]) -> Any:
        """What the verifier is asked for, besides the session's own name and the time."""
        answer = await self.send({"seed": 5, **fields})
        assert answer.status_code == 200, (fields, answer.text)
        assert '"error"' not in answer.text.replace('"error": null', "").replace('"error":null', ""), answer.text
        start = self._gateway.verifier.starts[-1]
        return list(start.tokens), start.contract

    async def refused(self, fields: dict[str, Any]) -> None:
        """Sends a field that is refused. Raises AssertionError if the error does not name it."""
        answer = await self.send(fields)
        error = answer.json()["error"]
        (name,) = fields
        assert answer.status_code == 400, answer.text
        assert name in error["message"], answer.text
        assert error.get("param", name) == name, answer.text  # Anthropic's have none


@pytest.fixture(params=[*ENDPOINTS])
async def caller(request: pytest.FixtureRequest, gateway: GatewayHarness) -> AsyncIterator[Caller]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as web:
        yield Caller(gateway, web, request.param)


async def test_a_field_that_is_served_is_taken_streamed_and_not(caller: Caller) -> None:
    for name in caller.fields(SERVED):
        if name in ELSEWHERE:
            continue
        fields = value(caller.path, name)
        await caller.asked(fields)
        await caller.asked({name: None} if name == "stream_options" else fields | {"stream": name not in WHOLE})


async def test_null_is_as_good_as_left_out(caller: Caller) -> None:
    whole = await caller.asked({})
    for name in (*caller.fields(SERVED), *caller.fields(REFUSED), *caller.fields(NO_EFFECT)):
        assert name == "seed" or await caller.asked({name: None}) == whole, name


async def test_a_field_without_effect_changes_nothing_that_the_verifier_is_asked_for(caller: Caller) -> None:
    whole = await caller.asked({})
    for name in caller.fields(NO_EFFECT):
        for given in ("x", {"x": 1}):
            assert await caller.asked({name: given}) == whole, name


async def test_a_field_that_is_not_served_is_refused_by_its_name_but_for_values_that_change_nothing(
    caller: Caller,
) -> None:
    whole = await caller.asked({})
    for name in caller.fields(REFUSED):
        extra = caller.kind.model_fields[name].json_schema_extra
        neutral: Any = extra["neutral"] if isinstance(extra, dict) else []
        for given in neutral:
            assert await caller.asked({name: given}) == whole, name
        for given in (["x"], 0.123):
            await caller.refused({name: given})


async def test_an_unknown_field_is_refused_by_its_name(caller: Caller) -> None:
    await caller.refused({"temprature": 1})
