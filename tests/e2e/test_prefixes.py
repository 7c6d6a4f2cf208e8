"""A prompt goes to the verifier that has read its beginning for another session, though one is idle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import outrider
from outrider.config import RouterConfig, VerifierConfig
from outrider.core.session.prefix_keys import LENGTHS, unpack_keys
from outrider.fleet.process import Process
from outrider.store.redis.client import connect
from outrider.store.redis.embedded import EmbeddedRedis
from outrider.store.registry import Registry
from tests.e2e.conftest import MODELS

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

MODEL = MODELS / "target"
SYSTEM = "".join(f"{number}. Answer in the style of chapter {number * 7}.\n" for number in range(20))
SLOTS = 16
SHARED = 192  # tokens that all texts with it begin with, at least
KEYS = LENGTHS.index(SHARED) + 1  # announced once this text is read; it is announced while it is being read, too


async def test_prompts_that_begin_alike_are_read_where_the_first_one_was(prompts: list[str]) -> None:
    verifying = VerifierConfig(model=MODEL, dtype="float32", slots=SLOTS, heartbeat_s=0.1)
    routing = RouterConfig(listen="127.0.0.1:0", models={"target": MODEL})
    with EmbeddedRedis() as redis:
        verifiers = [Process("verifier", f"verifier-{number}", verifying, print) for number in range(2)]
        router = Process("router", "router", routing, print)
        client = connect(redis.url)
        try:
            await asyncio.gather(*(each.start(redis.url) for each in (*verifiers, router)))
            async with outrider.AsyncClient(router.address) as sdk:

                async def begin(text: str) -> tuple[outrider.AsyncStream, AsyncIterator[outrider.Chunk], str]:
                    """A stream under way, and the verifier that it is at."""
                    stream = sdk.stream(text, max_tokens=500, ignore_eos=True, speculation="off", timeout=100)
                    chunks = aiter(stream)
                    await anext(chunks)
                    return stream, chunks, (await sdk.get_session(stream.session_id)).verifier

                first, firsts, there = await begin(SYSTEM + prompts[0])
                async with asyncio.timeout(10):
                    while not any(len(unpack_keys(it.prefixes)) >= KEYS for it in await Registry(client).workers()):
                        await asyncio.sleep(0.02)
                second, seconds, place = await begin(SYSTEM + prompts[1])
                other, others, elsewhere = await begin(prompts[2])
                assert place == there != elsewhere  # alone it would have gone where no session is
                for chunks in (firsts, seconds, others):
                    assert [chunk async for chunk in chunks]
                assert first.result.cached_tokens == other.result.cached_tokens == 0
                assert second.result.cached_tokens >= SHARED
        finally:
            await client.aclose()
            await asyncio.gather(*(process.stop() for process in (*verifiers, router)))
