"""A verifier dies, and another one that stood by has the KV of its sessions."""

from __future__ import annotations

import asyncio
import os
import re
import signal

import pytest

import outrider
from outrider.config import RouterConfig, VerifierConfig
from outrider.fleet.process import Process
from outrider.store.redis.embedded import EmbeddedRedis
from router.sessions.standby import MIN_MISSING_TOKENS
from tests.e2e.conftest import MODELS
from tests.e2e.mini_router import described

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

MODEL = MODELS / "target"
SESSIONS = 4
TOKENS = 800
READ = 200  # position that all sessions have passed when the verifier dies: early enough that none has ended
WENT_ON = re.compile(r"session \w+ goes on at \S+: (\d+) tokens read again")


async def test_a_standby_has_the_kv_that_a_dead_verifier_computed(prompts: list[str]) -> None:
    lines: list[str] = []

    def listen(name: str, line: str) -> None:
        print(name, line)
        lines.append(line)

    verifying = VerifierConfig(model=MODEL, dtype="float32", numerics="invariant", slots=2 * SESSIONS)
    routing = RouterConfig(listen="127.0.0.1:0", models={"target": MODEL}, standby=True)
    with EmbeddedRedis() as redis:
        verifiers = [Process("verifier", f"verifier-{number}", verifying, listen) for number in range(2)]
        router = Process("router", "router", routing, listen)
        try:
            await asyncio.gather(*(each.start(redis.url) for each in (*verifiers, router)))
            async with outrider.AsyncClient(router.address) as client:

                async def generate(number: int, seen: asyncio.Event | None = None) -> tuple[int, ...]:
                    stream = client.stream(
                        prompts[number % len(prompts)],
                        seed=number,
                        max_tokens=TOKENS,
                        ignore_eos=True,
                        speculation="off",
                        timeout=100,
                    )
                    async for chunk in stream:
                        if seen is not None and chunk.next_position > READ:
                            seen.set()
                    return stream.result.token_ids

                alone = [await generate(number) for number in range(SESSIONS)]
                seen = [asyncio.Event() for _ in range(SESSIONS)]
                generating = [asyncio.create_task(generate(number, seen[number])) for number in range(SESSIONS)]
                await asyncio.gather(*(event.wait() for event in seen))
                assert not any(each.done() for each in generating)
                os.kill(verifiers[0].pid, signal.SIGSTOP)
                await at_rest(verifiers[1].address)  # it has read what was committed, however slow the machine is
                os.kill(verifiers[0].pid, signal.SIGKILL)
                assert await asyncio.gather(*generating) == alone
        finally:
            await asyncio.gather(*(each.stop() for each in (router, *verifiers) if each.address))
    again = list(map(int, WENT_ON.findall("\n".join(lines))))
    assert again, "no session was at the verifier that died"
    assert max(again) <= MIN_MISSING_TOKENS + routing.window, again


async def at_rest(verifier: str) -> None:
    """Waits until the verifier has nothing to do."""
    steps = -1
    while (now := (await described(verifier)).steps) > steps:
        steps = now
        await asyncio.sleep(0.5)
