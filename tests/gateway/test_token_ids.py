"""Token ids of prompts and answers, as vLLM gives them: `return_token_ids` and `return_tokens_as_token_ids`."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import httpx
import pytest

from outrider.client import AsyncClient
from outrider.errors import Overloaded
from outrider.gateway.held_answers import ID_BYTES, HeldAnswers
from outrider.limits.tenant_shares import TenantShares
from tests.gateway.conftest import GatewayHarness
from tests.router.rig import ANSWER, MODEL, SCRIPT

WANTED = {"model": "target", "return_token_ids": True, "seed": 1}
PROMPTS = ["import os\n", "x = é"]
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": len(SCRIPT)}


async def post(harness: GatewayHarness, path: str, **body: Any) -> Any:
    async with httpx.AsyncClient(base_url=harness.url) as web:
        answer = await web.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


async def test_completions_have_the_ids_of_their_prompts_and_answers(harness: GatewayHarness) -> None:
    asked = {**WANTED, "prompt": PROMPTS, "n": 2, "max_tokens": len(SCRIPT)}
    whole = await post(harness, "/v1/completions", **asked)
    prompts = [MODEL.tokenizer.encode(text).ids for text in PROMPTS]
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [prompts[at // 2] for at in range(4)]
    assert all((choice["text"], choice["token_ids"]) == (ANSWER, SCRIPT) for choice in whole["choices"])
    first: dict[int, Any] = {}
    ids: defaultdict[int, list[int]] = defaultdict(list)
    for event in await post(harness, "/v1/completions", **asked, stream=True):
        (choice,) = event["choices"]
        if choice["index"] not in first:
            first[choice["index"]] = choice.pop("prompt_token_ids")
        assert "prompt_token_ids" not in choice
        ids[choice["index"]] += choice.get("token_ids", [])
    assert first == {at: prompts[at // 2] for at in range(4)}
    assert ids == dict.fromkeys(range(4), SCRIPT)


async def test_chats_have_those_of_their_prompt_once(chat_harness: GatewayHarness) -> None:
    prompt = (await post(chat_harness, "/tokenize", model="target", messages=CHAT["messages"]))["tokens"]
    whole = await post(chat_harness, "/v1/chat/completions", **WANTED, **CHAT, n=2)
    assert whole["prompt_token_ids"] == prompt
    assert [choice["token_ids"] for choice in whole["choices"]] == [SCRIPT, SCRIPT]
    first: dict[int, Any] = {}
    ids: defaultdict[int, list[int]] = defaultdict(list)
    for event in await post(chat_harness, "/v1/chat/completions", **WANTED, **CHAT, n=2, stream=True):
        (choice,) = event["choices"]
        if choice["index"] not in first:
            first[choice["index"]] = event.pop("prompt_token_ids")
        assert "prompt_token_ids" not in event
        ids[choice["index"]] += choice.get("token_ids", [])
    assert first == {0: prompt, 1: prompt}
    assert ids == {0: SCRIPT, 1: SCRIPT}


@pytest.mark.parametrize("stream", [False, True])
async def test_they_are_there_without_an_answer_and_absent_if_they_are_not_wanted(
    harness: GatewayHarness, stream: bool
) -> None:
    asked = {"model": "target", "prompt": [5, 6, 7], "stream": stream}
    nothing = await post(harness, "/v1/completions", **asked, return_token_ids=True, max_tokens=0)
    choice = (nothing[0] if stream else nothing)["choices"][0]
    assert (choice["prompt_token_ids"], choice.get("token_ids", [])) == ([5, 6, 7], [])
    assert "token_ids" not in json.dumps(await post(harness, "/v1/completions", **asked, max_tokens=3))


async def test_a_repeated_request_has_them_and_in_a_session_all_before_the_answer(harness: GatewayHarness) -> None:
    asked = {**WANTED, "prompt": [5, 6], "max_tokens": 2, "outrider": {"idempotency_key": "k"}}
    first, again = [await post(harness, "/v1/completions", **asked) for _ in range(2)]
    assert again["choices"] == first["choices"]
    assert again["choices"][0]["prompt_token_ids"] == [5, 6]
    async with AsyncClient(harness.rig.address) as client:
        made = await client.generate([5, 6], max_tokens=2, return_prompt_token_ids=True)
        turn = await client.generate([7], session=made.session_id, max_tokens=1, return_prompt_token_ids=True)
        plain = await client.generate([7], session=made.session_id, max_tokens=1)
    assert made.prompt_token_ids == (5, 6)
    assert turn.prompt_token_ids == (5, 6, *made.token_ids, 7)
    assert plain.prompt_token_ids == ()


def named(logprobs: Any) -> list[tuple[str, Any]]:
    """The tokens of log-probabilities by their names, with what else there is of each."""
    if "tokens" in logprobs:
        rows = zip(
            logprobs["tokens"], zip(logprobs["token_logprobs"], logprobs["text_offset"], strict=True), strict=True
        )
        return [*rows, *(item for top in logprobs["top_logprobs"] for item in top.items())]
    rows = [row for chosen in logprobs["content"] for row in (chosen, *chosen["top_logprobs"])]
    return [(row["token"], (row["logprob"], row["bytes"])) for row in rows]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 9, "logprobs": 2}),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    ],
)
async def test_tokens_with_log_probabilities_may_be_written_as_their_ids(
    chat_harness: GatewayHarness, path: str, fields: dict[str, Any], stream: bool
) -> None:
    answers = []
    for as_ids in (False, True):
        made = await post(
            chat_harness, path, model="target", seed=1, stream=stream, return_tokens_as_token_ids=as_ids, **fields
        )
        choices = [choice for event in (made if stream else [made]) for choice in event["choices"]]
        answers.append([row for choice in choices if choice["logprobs"] for row in named(choice["logprobs"])])
    texts, ids = answers
    assert texts
    for (text, figures), (name, same) in zip(texts, ids, strict=True):
        assert same == figures
        assert name.startswith("token_id:")
        own = MODEL.tokenizer.decode([int(name[9:])], skip_special_tokens=False)
        assert own == text or text.startswith("bytes:")


def test_ids_that_are_kept_count_for_their_tenant() -> None:
    total = TenantShares(10 * ID_BYTES, "bytes of answers")
    held = HeldAnswers(total, "")
    held.add_ids(9)
    assert total.held == 9 * ID_BYTES
    with pytest.raises(Overloaded):
        held.add_ids(2)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("field", ["return_token_ids", "return_tokens_as_token_ids"])
async def test_other_apis_refuse_them_by_name(harness: GatewayHarness, path: str, field: str) -> None:
    body = {"model": "target", "messages": CHAT["messages"], "max_tokens": 1, field: True}
    if path == "/v1/responses":
        body = {"model": "target", "input": "x", field: True}
    async with httpx.AsyncClient(base_url=harness.url) as web:
        answer = await web.post(path, json=body)
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]
