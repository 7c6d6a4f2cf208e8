"""Prompts with log-probabilities over HTTP: `echo`, `max_tokens: 0` and vLLM's `prompt_logprobs`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from outrider.client import AsyncClient, Generation
from outrider.config import ClusterConfig, GatewayConfig, RouterConfig, VerifierConfig
from outrider.fleet.cluster import LocalCluster
from tests.e2e.conftest import MODELS

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "The quick brown fox said to the crow: caf\u00e9, and \U0001f600 it was."
OTHER = "Once upon a time there was a wolf."
SEED = {"seed": 4, "ignore_eos": True}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster() -> AsyncIterator[LocalCluster]:
    config = ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": MODELS / "target"}),
        gateway=GatewayConfig(listen="127.0.0.1:0"),
        verifier=[VerifierConfig(model=MODELS / "target", dtype="float32", slots=8)],
    )
    async with LocalCluster(config, forward=lambda name, line: print(name, line)) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def web(cluster: LocalCluster) -> AsyncIterator[httpx.AsyncClient]:
    address = cluster.processes["gateway"].address
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=60) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def known(cluster: LocalCluster) -> Generation:
    async with AsyncClient(cluster.router_address) as client:
        return await client.generate(PROMPT, max_tokens=6, **SEED, logprobs=2, prompt_logprobs=2)


async def post(web: httpx.AsyncClient, path: str = "completions", **fields: Any) -> dict[str, Any]:
    answer = await web.post(f"/v1/{path}", json={"model": "target", **SEED, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def test_an_echo_has_the_prompts_text_and_log_probabilities_before_the_answers(
    web: httpx.AsyncClient, known: Generation
) -> None:
    body = await post(web, prompt=PROMPT, max_tokens=6, echo=True, logprobs=2)
    (choice,) = body["choices"]
    assert choice["text"] == PROMPT + known.text
    found, entries = choice["logprobs"], [*known.prompt_logprobs, *known.logprobs]
    assert found["token_logprobs"] == [None, *(entry.logprob for entry in entries[1:])]
    assert found["top_logprobs"][0] is None
    for top, entry in zip(found["top_logprobs"][1:], entries[1:], strict=True):
        assert {value for _, value in entry.top} | {entry.logprob} == {*top.values()}
    assert len(found["tokens"]) == len(found["text_offset"]) == len(entries)
    whole = [token for token in found["tokens"] if not token.startswith("bytes:")]
    assert all(token in choice["text"] for token in whole)
    assert found["text_offset"] == sorted(found["text_offset"])
    assert body["usage"]["completion_tokens"] == 6
    assert "prompt_logprobs" not in choice


async def test_without_an_answer_a_prompt_alone_is_scored(web: httpx.AsyncClient, known: Generation) -> None:
    body = await post(web, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    scored = [None, *(entry.logprob for entry in known.prompt_logprobs[1:])]
    assert choice["logprobs"]["token_logprobs"] == scored
    count = len(known.prompt_logprobs)
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (count, 0)
    nothing = await post(web, prompt=PROMPT, max_tokens=0)
    assert (nothing["choices"][0]["text"], nothing["choices"][0]["logprobs"]) == ("", None)


async def test_several_prompts_as_ids_are_scored_together(web: httpx.AsyncClient, known: Generation) -> None:
    ids = [entry.id for entry in known.prompt_logprobs]
    prompts = [ids, ids[:5], ids[:1]]
    body = await post(web, prompt=prompts, max_tokens=1, echo=True, logprobs=1)
    scored = [None, *(entry.logprob for entry in known.prompt_logprobs[1:])]
    for prompt, choice in zip(prompts, body["choices"], strict=True):
        assert choice["logprobs"]["token_logprobs"][:-1] == scored[: len(prompt)]
        assert len(choice["logprobs"]["tokens"]) == len(prompt) + 1


async def test_an_echo_without_log_probabilities_is_text_alone(web: httpx.AsyncClient, known: Generation) -> None:
    (choice,) = (await post(web, prompt=PROMPT, max_tokens=6, echo=True))["choices"]
    assert (choice["text"], choice["logprobs"]) == (PROMPT + known.text, None)


@pytest.mark.parametrize("max_tokens", [6, 0])
async def test_a_stream_of_an_echo_is_the_complete_answer_in_parts(web: httpx.AsyncClient, max_tokens: int) -> None:
    asked = {"prompt": PROMPT, "max_tokens": max_tokens, "echo": True, "logprobs": 2}
    (choice,) = (await post(web, **asked))["choices"]
    body = {"model": "target", **SEED, **asked, "stream": True, "stream_options": {"include_usage": True}}
    text, columns, usage = "", {name: [] for name in choice["logprobs"]}, None
    async with web.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event["usage"]
            for part in event["choices"]:
                text += part["text"]
                for name, column in (part["logprobs"] or {}).items():
                    columns[name] += column
    assert text == choice["text"]
    assert columns == choice["logprobs"]
    assert usage is not None
    assert usage["completion_tokens"] == max_tokens


async def test_prompt_logprobs_have_vllms_form(web: httpx.AsyncClient, known: Generation) -> None:
    expected = [
        {str(entry.id): entry.logprob} | {str(id_): logprob for id_, logprob in entry.top}
        for entry in known.prompt_logprobs[1:]
    ]
    (choice,) = (await post(web, prompt=PROMPT, max_tokens=1, prompt_logprobs=2))["choices"]
    first, *rows = choice["prompt_logprobs"]
    assert first is None
    assert [{id_: it["logprob"] for id_, it in row.items()} for row in rows] == expected
    for row, entry in zip(rows, known.prompt_logprobs[1:], strict=True):
        assert row[str(entry.id)]["rank"] == entry.rank
        assert {it["rank"] for it in row.values()} == {1, 2, entry.rank}
        assert all(isinstance(it["decoded_token"], str) for it in row.values())
    assert choice["logprobs"] is None
    both = (await post(web, prompt=PROMPT, max_tokens=0, prompt_logprobs=0, echo=True, logprobs=2))["choices"][0]
    assert [[*row] for row in both["prompt_logprobs"][1:]] == [[str(it.id)] for it in known.prompt_logprobs[1:]]
    assert len(both["logprobs"]["tokens"]) == len(known.prompt_logprobs)


async def test_a_chat_has_those_of_its_prompt_once(web: httpx.AsyncClient) -> None:
    asked = {"messages": [{"role": "user", "content": "x = 1"}], "max_completion_tokens": 3, "n": 2}
    body = await post(web, "chat/completions", **asked, prompt_logprobs=1)
    first, *rows = body["prompt_logprobs"]
    assert first is None
    assert len(rows) == body["usage"]["prompt_tokens"] - 1
    assert all(1 <= len(row) <= 2 for row in rows)
    plain = await post(web, "chat/completions", **asked)
    assert "prompt_logprobs" not in plain
    assert plain["choices"] == body["choices"]


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "are not streamed"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "greater than or equal to 0"),
        ({"max_tokens": 0, "min_tokens": 3}, "min_tokens", "0 to max_tokens"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    web: httpx.AsyncClient, fields: dict[str, Any], field: str, message: str
) -> None:
    answer = await web.post("/v1/completions", json={"model": "target", "prompt": OTHER, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert message in answer.json()["error"]["message"]
