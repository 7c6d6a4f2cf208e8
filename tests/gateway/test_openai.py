"""The gateway as OpenAI's own client sees it."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from outrider.config import GatewayConfig
from outrider.gateway.server import bound, server
from tests.gateway.conftest import GatewayHarness, gateway_harness
from tests.router.fakes import CONTEXT, FakeVerifier
from tests.router.rig import ANSWER, FOLDER, MODEL, SCRIPT, finished_reason, until

PROMPT = "import os\n"
PROMPT_TOKENS = len(MODEL.tokenizer.encode(PROMPT).ids)


async def test_models_are_listed_and_one_is_shown(harness: GatewayHarness) -> None:
    listed = [model async for model in harness.client.models.list()]
    assert [(model.id, model.object, model.owned_by) for model in listed] == [("target", "model", "outrider")]
    assert (await harness.client.models.retrieve("target")).id == "target"
    with pytest.raises(openai.NotFoundError):
        await harness.client.models.retrieve("other")


async def test_a_completion_has_the_router_s_answer_and_its_usage(harness: GatewayHarness) -> None:
    answer = await harness.client.completions.create(model="target", prompt=PROMPT, max_tokens=len(SCRIPT), seed=3)
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", "target")
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, ANSWER, "length", None)
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (PROMPT_TOKENS, len(SCRIPT))
    assert usage.total_tokens == PROMPT_TOKENS + len(SCRIPT)
    details = usage.completion_tokens_details
    assert details is not None  # the scripted verifier accepts none of four at each step
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 4 * len(SCRIPT))
    why = (usage.model_extra or {})["outrider"]
    assert why["speculation"] == "rejected"
    assert why["explanation"].startswith("drafts were verified, and the target chose none of them; ")
    assert (answer.model_extra or {})["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 1.0,
        "draft_acceptance_rate": 0.0,
        "acceptance_histogram": [len(SCRIPT), 0, 0, 0, 0],
        "num_spec_steps": len(SCRIPT),
        "num_draft_tokens": 4 * len(SCRIPT),
        "num_accepted_draft_tokens": 0,
        "num_spec_tokens": 4,
    }
    start = harness.verifier.starts[0]
    assert (start.contract.seed, start.contract.max_tokens) == (3, len(SCRIPT))


async def test_a_stream_brings_the_whole_answer_in_pieces(harness: GatewayHarness) -> None:
    stream = await harness.client.completions.create(
        model="target", prompt=PROMPT, max_tokens=len(SCRIPT), stream=True, stream_options={"include_usage": True}
    )
    pieces = [piece async for piece in stream]
    assert "".join(piece.choices[0].text for piece in pieces[:-1]) == ANSWER
    assert [piece.choices[0].finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 2) + ["length"]
    assert len({piece.id for piece in pieces}) == 1
    assert pieces[-1].choices == []
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == len(SCRIPT)
    assert (pieces[-1].model_extra or {})["metrics"]["speculative_decoding"]["num_spec_steps"] == len(SCRIPT)


async def test_choices_are_numbered_over_all_prompts_and_each_prompt_counts_once(harness: GatewayHarness) -> None:
    answer = await harness.client.completions.create(model="target", prompt=[PROMPT, "x"], max_tokens=2, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == PROMPT_TOKENS + len(MODEL.tokenizer.encode("x").ids)
    assert sorted(start.contract.choice for start in harness.verifier.starts) == [0, 0, 1, 1]
    assert len({start.contract.seed for start in harness.verifier.starts}) == 1
    stream = await harness.client.completions.create(model="target", prompt=PROMPT, max_tokens=2, n=3, stream=True)
    ends = [piece.choices[0].index async for piece in stream if piece.choices[0].finish_reason]
    assert sorted(ends) == [0, 1, 2]


async def test_token_ids_are_a_prompt(harness: GatewayHarness) -> None:
    await harness.client.completions.create(model="target", prompt=SCRIPT[:5], max_tokens=1)
    assert list(harness.verifier.starts[0].tokens) == SCRIPT[:5]


async def test_a_stop_string_is_no_part_of_the_text(harness: GatewayHarness) -> None:
    answer = await harness.client.completions.create(model="target", prompt=PROMPT, max_tokens=60, stop=["return"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (ANSWER.partition("return")[0], "stop")


async def test_log_probabilities_name_their_tokens(harness: GatewayHarness) -> None:
    answer = await harness.client.completions.create(model="target", prompt=PROMPT, max_tokens=4, logprobs=2)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert "".join(found.tokens) == answer.choices[0].text
    assert found.token_logprobs == [0.0, -1.0, -2.0, -3.0]
    assert found.text_offset == [sum(map(len, found.tokens[:place])) for place in range(4)]
    assert found.top_logprobs is not None
    assert all(isinstance(entry, dict) for entry in found.top_logprobs)


async def test_outrider_options_travel_in_the_extra_body(harness: GatewayHarness) -> None:
    await harness.client.completions.create(
        model="target", prompt=PROMPT, max_tokens=1, extra_body={"outrider": {"speculation": "off", "top_k": 7}}
    )
    start = harness.verifier.starts[0]
    assert (start.plan.depth, start.contract.top_k) == (0, 7)


INVALID: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({"temperature": 3}, 400, "temperature", "less than or equal to 2"),
    ({"top_p": 0}, 400, "top_p", "greater than 0"),
    ({"max_tokens": -2}, 400, "max_tokens", "greater than or equal to -1"),
    ({"max_tokens": 1000}, 400, "max_tokens", "at most"),
    ({"prompt": ""}, 400, "prompt", "empty"),
    ({"model": "gpt-4"}, 404, None, "not served here"),
    ({"best_of": 5}, 400, "best_of", "same as n"),
    ({"prompt": ["x"] * 33, "n": 4}, 400, "prompt", "is for 132 answers, must be at most 128"),
    ({"suffix": "x"}, 400, "suffix", "Unsupported parameter: 'suffix'"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias", "should match pattern"),
    ({"extra_body": {"guided": 1}}, 400, "guided", "Unrecognized request argument supplied: guided"),
    (
        {"extra_body": {"outrider": {"gamma": 1}}},
        400,
        "outrider.gamma",
        "Unrecognized request argument supplied: outrider.gamma",
    ),
    ({"extra_body": {"outrider": {"depth": 99}}}, 400, "depth", "1 to 64"),
    (
        {"n": 2, "extra_body": {"outrider": {"session": "s"}}},
        400,
        "session",
        "applies to a single answer, but the request is for 2",
    ),
    (
        {"prompt": ["x", "y"], "extra_body": {"outrider": {"idempotency_key": "k"}}},
        400,
        "idempotency_key",
        "applies to a single answer, but the request is for 2",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_invalid_request_is_refused_with_an_openai_error(harness: GatewayHarness, stream: bool) -> None:
    for wrong, status, param, fragment in INVALID:
        asked: dict[str, Any] = {"model": "target", "prompt": PROMPT, "max_tokens": 3, "stream": stream, **wrong}
        with pytest.raises(openai.APIStatusError) as refused:
            await harness.client.completions.create(**asked)
        error = refused.value
        assert (error.status_code, error.param, error.type) == (status, param, "invalid_request_error"), wrong
        assert fragment in error.message
    assert harness.verifier.starts == []


async def test_what_does_not_fit_into_the_context_has_openais_code_and_the_callers_field(
    redis_url: str, tmp_path: Path
) -> None:
    shutil.copytree(FOLDER, tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    async with gateway_harness(redis_url, models={"target": tmp_path / "chat"}) as harness:
        chat: Any = harness.client.chat.completions.create
        asked: list[tuple[str, int, dict[str, int]]] = [
            ("messages", 5000, {}),
            ("max_completion_tokens", 1, {"max_completion_tokens": 999}),
        ]
        for field, words, limit in asked:
            with pytest.raises(openai.BadRequestError) as refused:
                await chat(model="target", messages=[{"role": "user", "content": "x " * words}], **limit)
            assert (refused.value.code, refused.value.param) == ("context_length_exceeded", field)
            assert len({*re.findall("[0-9]+", refused.value.message)}) >= 3  # the status, and both numbers


async def test_malformed_json_and_unknown_paths_get_openai_errors(harness: GatewayHarness) -> None:
    async with httpx.AsyncClient(base_url=harness.url) as web:
        broken = await web.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
        missing = await web.post("/v1/completions", json={"model": "target"})
        elsewhere = await web.post("/v1/embeddings", json={})
    assert [answer.status_code for answer in (broken, missing, elsewhere)] == [400, 400, 404]
    for answer, fragment in ((broken, "parse the JSON"), (missing, "provide a prompt"), (elsewhere, "/v1/embeddings")):
        error = answer.json()["error"]
        assert {*error} == {"message", "type", "param", "code"}
        assert fragment in error["message"]


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_that_is_too_large_is_refused_unread(redis_url: str, announced: bool) -> None:
    async def parts() -> Any:
        for _ in range(64):
            yield b" " * 1024

    async with (
        gateway_harness(redis_url, gateway={"max_request_bytes": 4096}) as harness,
        httpx.AsyncClient(base_url=harness.url) as web,
    ):
        answer = await web.post("/v1/completions", content=b" " * 65536 if announced else parts())
        assert answer.status_code == 413
        assert answer.json()["error"]["message"] == "POST /v1/completions: the body is larger than 4096 bytes"
        assert (await web.get("/health")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_stops_the_verifier(redis_url: str, stream: bool) -> None:
    async with gateway_harness(redis_url, FakeVerifier(SCRIPT, pace_s=0.05)) as harness:
        asking = asyncio.create_task(_read(harness, stream))
        await until(lambda: harness.verifier.steps > 2)
        asking.cancel()
        await until(lambda: harness.verifier.open == 0)
        assert await finished_reason(harness.rig, harness.verifier.starts[0].session_id) == "cancelled"


async def _read(harness: GatewayHarness, stream: bool) -> None:
    answer = await harness.client.completions.create(model="target", prompt=PROMPT, max_tokens=50, stream=stream)
    if isinstance(answer, openai.AsyncStream):
        async for _ in answer:
            pass


async def test_keys_are_judged_by_the_router(redis_url: str) -> None:
    async with gateway_harness(redis_url, auth="keys") as harness:
        with pytest.raises(openai.AuthenticationError) as refused:
            await harness.client.completions.create(model="target", prompt=PROMPT)
        assert refused.value.code == "invalid_api_key"
        async with httpx.AsyncClient(base_url=harness.url) as web:
            assert (await web.get("/health")).status_code == 200  # it needs no key


async def test_an_overloaded_refusal_has_a_retry_time(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.1)
    async with gateway_harness(redis_url, verifier, max_sessions=1, queue=0) as harness:
        asking = asyncio.create_task(_read(harness, stream=True))
        await until(lambda: verifier.open == 1)
        with pytest.raises(openai.RateLimitError) as refused:
            await harness.client.completions.create(model="target", prompt=PROMPT)
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert refused.value.code == "rate_limit_exceeded"
        asking.cancel()


async def test_a_missing_router_is_reported_as_unavailable() -> None:
    with bound("127.0.0.1:0") as listening:
        harness = server(GatewayConfig(router="127.0.0.1:1"))
        serving = asyncio.create_task(harness.serve([listening]))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}") as web:
            health = await web.get("/health")
            answer = await web.post("/v1/completions", json={"model": "target", "prompt": "x"})
        harness.should_exit = True
        await serving
    assert [response.status_code for response in (health, answer)] == [503, 503]
    assert "no router can be reached" in answer.json()["error"]["message"]


async def test_requests_are_counted(harness: GatewayHarness) -> None:
    await harness.client.completions.create(model="target", prompt=PROMPT, max_tokens=1)
    async with httpx.AsyncClient(base_url=harness.url) as web:
        for path in ("/nowhere", "/metrics"):
            assert (await web.get(path)).status_code == 404
    assert harness.metrics.requests == {("/v1/completions", "200"): 1, ("other", "404"): 1, ("/metrics", "404"): 1}


FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "strict": True, "schema": {"type": "integer"}},
            }
        },
        "json_schema",
        '{"type": "integer"}',
    ),
    ({"extra_body": {"guided_json": '{"type": "integer"}'}}, "json_schema", '{"type": "integer"}'),
    ({"extra_body": {"guided_json": {"type": "integer"}}}, "json_schema", '{"type": "integer"}'),
    ({"extra_body": {"guided_regex": "[0-9]"}}, "regex", "[0-9]"),
    ({"extra_body": {"guided_choice": ["a", "b"]}}, "choices", '["a", "b"]'),
    ({"extra_body": {"guided_grammar": 'start: "a"'}}, "lark", 'start: "a"'),
]


async def test_the_form_of_an_answer_reaches_the_verifier(chat_harness: GatewayHarness) -> None:
    messages: list[Any] = [{"role": "user", "content": "x"}]
    for asked, kind, text in FORMS:
        await chat_harness.client.chat.completions.create(model="target", messages=messages, max_tokens=1, **asked)
        grammar = chat_harness.verifier.starts[-1].contract.grammar
        assert (grammar.kind, grammar.text) == (kind, text)
    assert len(chat_harness.verifier.starts) == len(FORMS)


async def test_a_chat_is_rendered_by_the_models_own_template(chat_harness: GatewayHarness) -> None:
    harness = chat_harness
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "f."}]},
    ]
    prompt = MODEL.tokenizer.encode("<system>Be brief.\n<user>Say f.\n<assistant>", add_special_tokens=False).ids
    answer = await harness.client.chat.completions.create(
        model="target", messages=messages, max_completion_tokens=4, logprobs=True, top_logprobs=1
    )
    assert list(harness.verifier.starts[0].tokens) == prompt
    (choice,) = answer.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    assert [bytes(entry.bytes or ()).decode() for entry in choice.logprobs.content] == [
        entry.token for entry in choice.logprobs.content
    ]
    assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [1] * 4
    stream = await harness.client.chat.completions.create(
        model="target", messages=messages, max_tokens=len(SCRIPT), stream=True
    )
    deltas = [piece.choices[0].delta async for piece in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == ANSWER


async def test_a_returned_answer_continues_the_conversation_and_fills_the_context(chat_harness: GatewayHarness) -> None:
    asked: list[Any] = [{"role": "user", "content": "Say f."}]
    first = await chat_harness.client.chat.completions.create(model="target", messages=asked, max_tokens=4)
    asked += [first.choices[0].message, {"role": "user", "content": "More."}]
    second = await chat_harness.client.chat.completions.create(model="target", messages=asked)
    assert second.usage is not None
    assert second.usage.total_tokens == CONTEXT
    start = chat_harness.verifier.starts[-1]
    conversation = f"<user>Say f.\n<assistant>{first.choices[0].message.content}\n<user>More.\n<assistant>"
    assert list(start.tokens) == MODEL.tokenizer.encode(conversation, add_special_tokens=False).ids


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    (
        {"functions": [{"name": "f"}]},
        "Unsupported parameter: 'functions' is not served here",
    ),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "json_schema: is for the type json_schema"),
    ({"extra_body": {"guided_json": "{"}}, "is no JSON"),
    ({"extra_body": {"guided_json": {}, "guided_regex": "a"}}, "does not go with"),
    ({"extra_body": {"guided_regex": "("}}, "guided_regex: cannot be followed"),
    ({"extra_body": {"structured_outputs": {"choice": [""]}}}, "structured_outputs"),
    ({"extra_body": {"guided_regex": "a", "outrider": {"ignore_eos": True}}}, "ignore_eos"),
    ({"messages": []}, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0' has a part of type 'image_url': models here read text only",
    ),
    ({"top_logprobs": 2}, "top_logprobs: needs logprobs"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens: is the older name"),
]


async def test_a_feature_that_a_text_model_lacks_is_refused_by_name(harness: GatewayHarness) -> None:
    for wrong, fragment in UNSUPPORTED:
        asked: dict[str, Any] = {"model": "target", "messages": [{"role": "user", "content": "x"}], **wrong}
        with pytest.raises(openai.BadRequestError) as refused:
            await harness.client.chat.completions.create(**asked)
        assert fragment in refused.value.message
    assert harness.verifier.starts == []


async def test_reasoning_is_returned_apart_from_the_content(redis_url: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant><think>\n"
    )
    asked: Any = {"model": "target", "messages": [{"role": "user", "content": "x"}], "max_tokens": len(SCRIPT)}
    async with gateway_harness(redis_url, models={"target": tmp_path / "chat"}) as harness:
        message = (await harness.client.chat.completions.create(**asked)).choices[0].message
        pieces = [piece async for piece in await harness.client.chat.completions.create(stream=True, **asked)]
    deltas = [piece.choices[0].delta for piece in pieces]
    assert (message.model_extra or {})["reasoning_content"] == ANSWER.lstrip("\n")
    assert message.content == ""
    assert "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas) == ANSWER.lstrip("\n")
    assert not any(delta.content for delta in deltas)
