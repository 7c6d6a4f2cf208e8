"""Fields and messages as client programs send them, and what the cluster is asked for then."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from outrider.gateway.schema import Chat, Completion, GenerationForm
from tests.gateway.conftest import GatewayHarness, gateway_harness
from tests.router.fakes import FakeVerifier
from tests.router.rig import FOLDER, SCRIPT

ASKED = [{"role": "user", "content": "x"}]
CHAT, COMPLETION = {"model": "m", "messages": ASKED}, {"model": "m", "prompt": "x"}
NEUTRAL: dict[type[GenerationForm], list[dict[str, Any]]] = {
    kind: [
        {name: value}
        for name, field in kind.model_fields.items()
        if isinstance(extra := field.json_schema_extra, dict)
        for value in extra["neutral"]  # type: ignore[union-attr]
    ]
    for kind in (Chat, Completion)
}
OTHER = {bool: lambda value: not value, int: lambda value: value + 2, str: lambda value: value + "x"}


def options(kind: type[GenerationForm], **fields: Any) -> dict[str, Any]:
    return dict(kind.model_validate((CHAT if kind is Chat else COMPLETION) | fields).options())


@pytest.mark.parametrize("kind", [Chat, Completion])
def test_values_that_change_nothing_are_taken_and_others_refused_by_name(kind: type[GenerationForm]) -> None:
    assert len(NEUTRAL[kind]) >= 13
    for fields in NEUTRAL[kind]:
        assert options(kind, **fields) == options(kind)
        ((name, value),) = fields.items()
        other = OTHER[type(value)](value) if type(value) in OTHER else ["x"]
        with pytest.raises(ValidationError) as refused:
            options(kind, **{name: other})
        (error,) = refused.value.errors()
        assert error["loc"] == (name,)
        assert error["type"] == "unsupported"


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 5, "min_p": 0.5, "repetition_penalty": 1.5}, {"top_k": 5, "min_p": 0.5, "repetition_penalty": 1.5}),
        ({"repeat_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"min_tokens": 3, "ignore_eos": True}, {"min_tokens": 3, "ignore_eos": True}),
        ({"stop_token_ids": [7]}, {"stop_ids": (7,)}),
        ({"priority": 5}, {"priority": "batch"}),
        ({"priority": 0}, {}),
        ({"max_tokens": -1}, {"max_tokens": None}),
        ({"structured_outputs": {"json": {"type": "null"}}}, {"schema": {"type": "null"}}),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, {"schema": {"type": "null"}}),
        ({"structured_outputs": {"json_object": True, "structural_tag": None}}, {"schema": {"type": "object"}}),
        ({"structured_outputs": {"regex": "a"}}, {"regex": "a"}),
        ({"structured_outputs": {"choice": ["a"]}}, {"choices": ["a"]}),
        ({"structured_outputs": {"grammar": "start: 'a'"}}, {"grammar": "start: 'a'"}),
        ({"request_id": "x", "cache_prompt": True, "user": "x"}, {}),
        ({"min_p": 0.5, "outrider": {"top_k": 6}}, {"min_p": 0.5, "top_k": 6}),
    ],
)
def test_fields_of_other_engines_are_served(fields: dict[str, Any], meant: dict[str, Any]) -> None:
    for kind in (Chat, Completion):
        assert options(kind, **fields) == options(kind) | meant


FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"guided_json": {}, "response_format": FORM}, "response_format: does not go with guided_json"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs: does not go with"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs: does not go with"),
        ({"structured_outputs": {"structural_tag": "a"}}, "is not served here"),
        ({"structured_outputs": {"tag": "a"}}, "Extra inputs"),
        ({"response_format": {**FORM, "schema": {}}}, "schema: is for the type json_object"),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty: is another name"),
        ({"top_k": 5, "outrider": {"top_k": 6}}, "top_k: is in outrider, too"),
    ],
)
def test_nothing_that_changes_an_answer_is_dropped(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        options(Chat, **fields)


def test_the_effort_of_reasoning_is_handed_to_the_template() -> None:
    assert options(Chat, reasoning_effort="high")["template_variables"] == {"reasoning_effort": "high"}
    assert "template_variables" not in options(Chat, reasoning_effort="none")


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "meant"),
    [
        (
            {"content": "a", "refusal": None, "audio": None, "function_call": None, "annotations": [], "x": 1},
            {"content": "a"},
        ),
        ({"content": "a", "reasoning_content": "b"}, {"content": "a", "reasoning_content": "b"}),
        ({"content": "a", "reasoning": "b"}, {"content": "a", "reasoning_content": "b"}),
        ({"content": None, "tool_calls": [{**CALL, "index": 0, "extra_content": {}}]}, {"tool_calls": [CALL]}),
        ({"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {}}}]}, {"tool_calls": [CALL]}),
        ({"content": None, "refusal": "no"}, {"content": "no"}),
        ({"content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}, {"content": "a"}),
        ({"content": [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]}, {"content": "ab"}),
        ({}, {}),
    ],
)
def test_what_an_assistant_has_said_is_taken_back(message: dict[str, Any], meant: dict[str, Any]) -> None:
    made = options(Chat, messages=[*ASKED, {"role": "assistant", **message}])["messages"][1]
    assert made == {"role": "assistant", "content": ""} | meant


async def test_an_answer_of_the_gateway_is_taken_back_whole(redis_url: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "chat")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.reasoning_content }}\n{% endfor %}"
    (tmp_path / "chat" / "chat_template.jinja").write_text(template)
    async with gateway_harness(redis_url, models={"target": tmp_path / "chat"}) as harness:
        create: Any = harness.client.chat.completions.create
        first = await create(model="target", messages=ASKED, max_tokens=2)
        said = first.choices[0].message.model_dump() | {"annotations": [], "reasoning_content": "hm"}
        second = await create(model="target", messages=[*ASKED, said, *ASKED], max_tokens=2)
    assert second.choices[0].finish_reason == "length"
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


async def test_each_event_has_the_usage_so_far_where_a_request_wants_it(harness: GatewayHarness) -> None:
    create: Any = harness.client.completions.create
    shown = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"model": "target", "prompt": ["x y", "z"], "n": 2, "max_tokens": 4}
    events = [event async for event in await create(**asked, stream=True, stream_options=shown)]
    *parts, last = [event.usage for event in events]
    counts = [usage.completion_tokens for usage in parts]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == last.completion_tokens == 16
    assert parts[-1].prompt_tokens == last.prompt_tokens
    assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in parts)


async def test_what_an_answer_is_not_held_to_is_named_in_a_header(harness: GatewayHarness) -> None:
    loose = {"type": "array", "uniqueItems": True, "items": {"type": "string", "format": "phone"}}
    asked = {"model": "target", "prompt": "x", "max_tokens": 2}
    async with httpx.AsyncClient(base_url=f"{harness.url}/v1") as web:
        for stream in (False, True):
            answer = await web.post("/completions", json={**asked, "stream": stream, "guided_json": loose})
            assert answer.status_code == 200
            assert answer.headers["outrider-not-enforced"] == "#/uniqueItems, #/items/format"
        whole = await web.post("/completions", json={**asked, "structured_outputs": {"json": {"type": "string"}}})
        refused = await web.post("/completions", json={**asked, "structured_outputs": {"json": {"not": {}}}})
    assert "outrider-not-enforced" not in whole.headers
    assert refused.json()["error"]["param"] == "structured_outputs"
    assert "#/not cannot be followed by an answer" in refused.json()["error"]["message"]


async def test_a_repeated_request_with_a_key_gets_its_answer_with_and_without_a_seed(redis_url: str) -> None:
    async with gateway_harness(redis_url, FakeVerifier(SCRIPT, pace_s=0.01)) as harness:
        create: Any = harness.client.completions.create
        for key, seed in (("a", None), ("b", 7)):
            asked = {"model": "target", "prompt": "x", "max_tokens": 5, "seed": seed}
            keyed = {"extra_body": {"outrider": {"idempotency_key": key}}}
            answers = [await create(**asked, **keyed) for _ in range(2)]
            assert len({answer.choices[0].text for answer in answers}) == 1
    assert len(harness.verifier.starts) == 2
