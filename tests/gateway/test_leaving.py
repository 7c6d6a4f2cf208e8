"""Clients that read slowly or leave several answers: what they hold is bounded, and nothing of them is left."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

import outrider
from outrider.client import AsyncStream, Chunk, _calls
from tests.gateway.conftest import gateway_harness
from tests.router import fakes
from tests.router.fakes import FakeVerifier
from tests.router.rig import SCRIPT, finished_reason, until

LONG = 100_000  # tokens of an answer: megabytes, more than the kernel keeps for a connection
ASKED: dict[str, Any] = {"model": "target", "prompt": "x", "max_tokens": 50, "n": 4, "stream": True}


def ours() -> list[str]:
    """The tasks of the gateway and of the SDK that run."""
    running = [task.get_coro() for task in asyncio.all_tasks()]
    files = [code.co_filename for coro in running if (code := getattr(coro, "cr_code", None))]
    return [file for file in files if Path(file).parent.name in ("gateway", "client") and "tests" not in file]


@pytest.fixture(autouse=True)
def closed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_calls, "IDLE_S", 0.1)  # a stream of answers without calls is left open for a while


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_ends_all_of_its_answers(redis_url: str, stream: bool) -> None:
    async with gateway_harness(redis_url, FakeVerifier(SCRIPT, pace_s=0.05)) as harness:
        async with httpx.AsyncClient(base_url=harness.url) as web:
            asking = asyncio.create_task(_read(web, {**ASKED, "stream": stream}))
            await until(lambda: harness.verifier.open == 4 and harness.verifier.steps > 16 and len(ours()) >= 4)
            asking.cancel()
        await until(lambda: harness.verifier.open == 0)
        for start in harness.verifier.starts:
            assert await finished_reason(harness.rig, start.session_id) == "cancelled"
        await until(lambda: not ours() and harness.metrics.running == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_session_keeps_what_a_client_that_leaves_has_received_and_no_more(redis_url: str, stream: bool) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.02)
    async with gateway_harness(redis_url, verifier) as harness, outrider.AsyncClient(harness.rig.address) as client:
        session = await client.create_session()
        first = await client.generate("a = 1\n", session=session.session_id, max_tokens=4)
        asked = {"model": "target", "prompt": "b", "stream": stream, "outrider": {"session": session.session_id}}
        async with httpx.AsyncClient(base_url=harness.url) as web:
            asking = asyncio.create_task(_read(web, asked))
            await until(lambda: len(verifier.starts) == 2 and verifier.steps > 10)
            asking.cancel()
        assert await finished_reason(harness.rig, session.session_id) == "cancelled"
        kept, record = await harness.rig.sessions.read(session.session_id), await client.get_session(session.session_id)
        assert record.length == len(kept.tokens)
        answer = kept.tokens[verifier.starts[1].answer_position :]
        assert list(answer) == (SCRIPT[: len(answer)] if stream else [])
        assert bool(answer) is stream
        assert len(kept.tokens) > len(first.token_ids) + 1
        again = await client.generate("c", session=session.session_id, max_tokens=4)
        assert list(again.token_ids) == SCRIPT[:4]
        assert verifier.starts[2].tokens[: len(kept.tokens)] == list(kept.tokens)


async def _read(web: httpx.AsyncClient, asked: dict[str, Any]) -> None:
    async with web.stream("POST", "/v1/completions", json=asked) as answer:
        async for _ in answer.aiter_bytes():
            pass


async def test_the_gateway_stops_reading_an_answer_that_its_caller_does_not_read(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fakes, "CONTEXT", 2 * LONG)
    taken = 0
    take = AsyncStream.next

    async def counted(stream: AsyncStream) -> Chunk | None:
        nonlocal taken
        chunk = await take(stream)
        taken += len(chunk.token_ids) if chunk else 0
        return chunk

    monkeypatch.setattr(AsyncStream, "next", counted)
    async with gateway_harness(redis_url, FakeVerifier(SCRIPT, stride=64)) as harness:
        with socket.socket() as unread:
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # the kernel's megabytes are not the gateway's
            unread.connect(("127.0.0.1", int(harness.url.rpartition(":")[2])))
            body = json.dumps({**ASKED, "max_tokens": LONG, "logprobs": 20})
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
            unread.sendall(f"{head}content-type: application/json\r\n\r\n{body}".encode())
            stood, before = 0, 0
            while stood < 4:  # looks in a row at which nothing came
                await asyncio.sleep(0.25)
                stood, before = (stood + 1 if taken == before > 0 else 0), taken
            assert len(ours()) >= 4
            print(f"\nof 4 answers that nobody reads the gateway took {taken} tokens of {4 * LONG}")
            assert taken < LONG
        await until(lambda: not ours())
