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


async def call(callers: Callers) -> None:
    """Run the callers, and print when the measurement begins and what it gave."""
    now, seeds = [_Counts()], count()
    async with AsyncClient(callers.router, tls=False) as client:
        tasks = [asyncio.create_task(_caller(client, callers, now, seeds)) for _ in range(callers.sessions)]
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
        made_up = [FIRST_ID + (seed * 7 + place) % 1000 for place in range(PROMPT_TOKENS)]
        stream = client.stream(
            callers.prompts[seed % len(callers.prompts)] if callers.prompts else made_up,
            speculation=callers.speculation,
            max_tokens=ANSWER_TOKENS,
            seed=seed,
            ignore_eos=True,
        )
        last = None
        async for chunk in stream:
            now, counts = time.perf_counter(), present[0]
            counts.tokens += len(chunk.token_ids)
            counts.chunks += 1
            if last is not None:
                counts.gaps.append(now - last)
            last = now


def main() -> None:
    callers = Callers(**json.loads(sys.argv[1]))
    StageSampler("client", Path(callers.stages)).start()
    asyncio.run(call(callers))


if __name__ == "__main__":
    main()
