"""The only verifier of a model ends in the middle of an answer and comes back much later: the answer waits for it."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

import outrider
from outrider.config import RouterConfig, VerifierConfig
from outrider.fleet.process import Process
from outrider.store.redis.embedded import EmbeddedRedis
from tests.e2e.conftest import MODELS

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

AWAY_S = 9.0  # longer than the SDK tries again


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
async def test_an_answer_outlasts_the_restart_of_its_only_verifier(prompts: list[str], how: signal.Signals) -> None:
    verifying = VerifierConfig(model=MODELS / "drafter", dtype="float32", numerics="invariant")
    routing = RouterConfig(listen="127.0.0.1:0", models={"drafter": MODELS / "drafter"})
    with EmbeddedRedis() as redis:
        router = Process("router", "router", routing, print)
        verifiers = [Process("verifier", f"verifier-{number}", verifying, print) for number in range(2)]
        try:
            await asyncio.gather(*(each.start(redis.url) for each in (router, verifiers[0])))
            async with outrider.AsyncClient(router.address) as client:
                terms = {"seed": 7, "temperature": 0.8, "max_tokens": 900, "ignore_eos": True, "timeout": 100}
                alone = await client.generate(prompts[0], **terms)
                stream = client.stream(prompts[0], **terms)
                reading = aiter(stream)
                chunks = [await anext(reading)]
                os.kill(verifiers[0].pid, how)
                await asyncio.sleep(AWAY_S)
                await verifiers[1].start(redis.url)
                chunks += [chunk async for chunk in reading]
            assert "".join(chunk.text for chunk in chunks) == alone.text
            assert stream.result.token_ids == alone.token_ids
            assert stream.result.resumes == 0
        finally:
            await asyncio.gather(*(each.stop() for each in (router, *verifiers) if each.address))
