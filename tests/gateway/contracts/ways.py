"""Sends one request in four ways, streamed and not, with drafts and without: the answer has to be right, and one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tokenizers import AddedToken

from tests.e2e.chat import chat_clients

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WAYS = [(stream, drafts) for stream in (False, True) for drafts in (True, False)]


@dataclass(frozen=True)
class Answer:
    """An answer, put together alike whether it was streamed or not."""

    choices: list[dict[str, Any]]
    usage: dict[str, Any]
    prompt_token_ids: list[int] | None = None  # of a chat
    not_enforced: str | None = None

    @property
    def first(self) -> dict[str, Any]:
        return self.choices[0]

    @property
    def same(self) -> Any:
        """What has to be equal, however it came about."""
        return self.choices, self.usage["prompt_tokens"], self.usage["completion_tokens"], self.prompt_token_ids


def made(answer: httpx.Response, *, stream: bool) -> Answer:
    if not stream:
        events = [answer.json()]
    else:
        lines = answer.text.splitlines()
        assert lines[-2] == "data: [DONE]", answer.text
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            join(choices.setdefault(choice["index"], {"text": None, "calls": [], "reason": None}), choice)
    prompts = [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event]
    assert all(prompt == prompts[0] for prompt in prompts)
    return Answer(
        [choices[index] for index in sorted(choices)],
        events[-1]["usage"],
        prompts[0] if prompts else None,
        answer.headers.get("outrider-not-enforced"),
    )


def join(whole: dict[str, Any], choice: dict[str, Any]) -> None:
    """Add a part of a choice, or all of it, to what there is."""
    part = choice.get("message") or choice.get("delta") or choice
    for name, place in (("text", "text"), ("content", "text"), ("reasoning_content", "reasoning")):
        if (text := part.get(name)) is not None:
            whole[place] = (whole.get(place) or "") + text
    for at, call in enumerate(part.get("tool_calls") or ()):
        if "id" in call:
            whole["calls"].append([call["function"]["name"], ""])
        whole["calls"][call.get("index", at)][1] += call["function"]["arguments"]
    for name in ("token_ids", "prompt_token_ids"):
        if name in choice:
            whole[name] = whole.get(name, []) + choice[name]
    for name, entries in (choice["logprobs"] or {}).items():
        whole[name] = whole.get(name, []) + (entries or [])
    whole["reason"] = choice["finish_reason"] or whole["reason"]


@dataclass(frozen=True)
class Case:
    """A request, and what its answer has to be."""

    path: str
    body: dict[str, Any]
    right: Callable[[Answer], None] = lambda answer: None
    same_as: dict[str, Any] | None = None  # the answer to this request is the same one
    cut: bool = False  # a stream has begun calls that turn out to be none


@asynccontextmanager
async def drafting_gateway(
    folder: Path, template: str, added: Sequence[AddedToken] = ()
) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway of a cluster that drafts always, whether that pays or not; the rest as `chat_clients`."""
    async with chat_clients(folder, template, added, policy="rounds", depth=4, wait_us=50_000) as clients:
        url = str(clients.openai.base_url).removesuffix("/v1/")
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            yield client


async def send(
    web: httpx.AsyncClient, path: str, body: dict[str, Any], *, stream: bool, drafts: bool
) -> httpx.Response:
    way: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    if not drafts:
        way["outrider"] = {"speculation": "off"}
    return await web.post(path, json={"model": "target", "seed": 5, **body, **way})


async def check_four_ways(web: httpx.AsyncClient, case: Case) -> None:
    """Fails where an answer is not what the case says, or the ways have different answers."""
    asked = [(body, *way) for body in (case.body, case.same_as) if body is not None for way in WAYS]
    responses = await asyncio.gather(
        *(send(web, case.path, body, stream=stream, drafts=drafts) for body, stream, drafts in asked)
    )
    assert {response.status_code for response in responses} == {200}, responses[0].text
    answers = [made(response, stream=stream) for response, (_, stream, _) in zip(responses, asked, strict=True)]
    for answer, (_, _, drafts) in zip(answers, asked, strict=True):
        case.right(answer)
        assert drafts or answer.usage["completion_tokens_details"]["accepted_prediction_tokens"] == 0
    if case.cut:
        whole, other, streamed, again = [answer.first for answer in answers]
        assert (whole, streamed) == (other, again)
        assert whole["text"].startswith('{"name"')
        assert (whole["calls"], whole["reason"], streamed["reason"]) == ([], "length", "length")
    else:
        assert [answer.same for answer in answers] == [answers[0].same] * len(answers)
