"""The callers of the benchmark, in a process of their own: `python -m bench.cpu.client JSON`.

It prints a line when the measurement begins and one with the figures when it ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path

from bench.cpu.engine import FIRST_ID
from bench.cpu.stages import StageSampler
from outrider.client import AsyncClient
from outrider.core.session.contract import PolicyName

PROMPT_TOKENS = 64
ANSWER_TOKENS = 512
RAMP_S = 3.0


@dataclass(frozen=True, slots=True)
class Callers:
    """Callers that each request one answer after another."""

    router: str
    sessions: int
    seconds: float
    speculation: PolicyName
    stages: str  # file for the time of each stage
    prompts: tuple[str, ...] = ()  # texts; none: tokens that are made up
    gateway: str = ""  # HOST:PORT of a gateway to call over HTTP; "": they call the router with the SDK

    def to_json(self) -> str:
        """Return it as one argument of a command."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class ClientFigures:
    """What the callers received during the measurement."""

    seconds: float
    tokens: int
    chunks: int
    gaps_ms: tuple[float, ...]  # from one chunk of a session to its next


@dataclass(slots=True)
class _Counts:
    """What has arrived since the measurement began."""

    tokens: int = 0
    chunks: int = 0
    gaps: list[float] = field(default_factory=list)  # seconds

    def add(self, tokens: int, last: float | None) -> float:
        """Count a chunk; `last`: when the one before it came. Return the present time."""
        now = time.perf_counter()
        self.tokens += tokens
        self.chunks += 1
        if last is not None:
            self.gaps.append(now - last)
        return now


async def call(callers: Callers) -> None:
    """Run the callers, and print when the measurement begins and what it gave."""
    now, seeds = [_Counts()], count()
    async with AsyncClient(callers.router, tls=False) as client:
        tasks = [
            asyncio.create_task(
                _web_caller(callers, now, seeds) if callers.gateway else _caller(client, callers, now, seeds)
            )
            for _ in range(callers.sessions)
        ]
        await asyncio.sleep(RAMP_S)
        counts = now[0] = _Counts()
        began = time.perf_counter()
        print("begin", flush=True)
        await asyncio.sleep(callers.seconds)
        figures = ClientFigures(
            time.perf_counter() - began,
            counts.tokens,
            counts.chunks,
            tuple(round(gap * 1e3, 3) for gap in counts.gaps),
        )
        print(json.dumps(asdict(figures)), flush=True)
        await asyncio.to_thread(sys.stdin.read)  # until the measuring process has its figures
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _caller(client: AsyncClient, callers: Callers, present: list[_Counts], seeds: count[int]) -> None:
    """Request one answer after another, and count what arrives in `present[0]`."""
    while True:
        seed = next(seeds)
        stream = client.stream(
            callers.prompts[seed % len(callers.prompts)] if callers.prompts else _made_up(seed),
            speculation=callers.speculation,
            max_tokens=ANSWER_TOKENS,
            seed=seed,
            ignore_eos=True,
        )
        last = None
        async for chunk in stream:
            last = present[0].add(len(chunk.token_ids), last)


async def _web_caller(callers: Callers, present: list[_Counts], seeds: count[int]) -> None:
    """Request one answer after another from the gateway, over HTTP. Without speculation each event has a token."""
    host, _, port = callers.gateway.rpartition(":")
    while True:
        seed = next(seeds)
        asked = {
            "model": "target",
            "prompt": _made_up(seed),
            "max_tokens": ANSWER_TOKENS,
            "seed": seed,
            "stream": True,
            "outrider": {"speculation": callers.speculation, "ignore_eos": True},
        }
        body = json.dumps(asked)
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n"
            writer.write(f"{head}content-type: application/json\r\nconnection: close\r\n\r\n{body}".encode())
            last = None
            async for line in reader:
                if line.startswith(b"data: {"):
                    last = present[0].add(1, last)
        finally:
            writer.close()


def _made_up(seed: int) -> list[int]:
    return [FIRST_ID + (seed * 7 + place) % 1000 for place in range(PROMPT_TOKENS)]


def main() -> None:
    callers = Callers(**json.loads(sys.argv[1]))
    StageSampler("client", Path(callers.stages)).start()
    asyncio.run(call(callers))


if __name__ == "__main__":
    main()
