"""Several HTTP requests at once with one idempotency key: one runs, and all receive its answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import gateway_harness
from tests.router.fakes import FakeVerifier
from tests.router.rig import MODEL, SCRIPT, until

TEXT = MODEL.tokenizer.decode(SCRIPT[:12])
ASKED: dict[str, Any] = {"model": "target", "prompt": "x", "max_tokens": 12, "outrider": {"idempotency_key": "k"}}


async def text_of(web: httpx.AsyncClient, *, stream: bool) -> str:
    answer = await web.post("/v1/completions", json={**ASKED, "stream": stream})
    assert answer.status_code == 200, answer.text
    if not stream:
        return str(answer.json()["choices"][0]["text"])
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])


@pytest.mark.parametrize("stream", [False, True])
async def test_equal_requests_at_once_all_receive_the_answer_of_one(redis_url: str, stream: bool) -> None:
    async with (
        gateway_harness(redis_url, FakeVerifier(SCRIPT, pace_s=0.02)) as harness,
        httpx.AsyncClient(base_url=harness.url) as web,
    ):
        texts = await asyncio.gather(*(text_of(web, stream=stream) for _ in range(4)))
        assert texts == [TEXT] * 4
        assert len(harness.verifier.starts) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_equal_requests_receive_the_answer_also_when_the_client_of_the_first_leaves(
    redis_url: str, stream: bool
) -> None:
    async with (
        gateway_harness(redis_url, FakeVerifier(SCRIPT, pace_s=0.05)) as harness,
        httpx.AsyncClient(base_url=harness.url) as web,
    ):
        first = asyncio.create_task(text_of(web, stream=stream))
        await until(lambda: harness.verifier.steps >= 3)
        second = asyncio.create_task(text_of(web, stream=stream))
        await asyncio.sleep(0.1)
        first.cancel()
        assert await second == TEXT
        assert await text_of(web, stream=stream) == TEXT
        assert harness.verifier.starts[0].session_id == harness.verifier.starts[-1].session_id
