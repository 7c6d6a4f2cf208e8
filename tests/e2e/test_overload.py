"""Four times the load that a cluster sustains: it goes on at its peak and refuses the rest at once, grown no fatter."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

import pytest
import pytest_asyncio

import outrider
from outrider.config import ClusterConfig, RouterConfig, VerifierConfig
from outrider.errors import Overloaded
from outrider.fleet.cluster import LocalCluster
from tests.e2e.conftest import MODELS

pytestmark = pytest.mark.asyncio(loop_scope="session")

SLOTS = 8
QUEUE = 16
TOKENS = 64  # of an answer
TIMES = 4  # the sustainable load
PEAK_S = 8.0  # duration of the peak's measurement
RAMP_S = 3.0  # before anything is counted
LONGEST_REFUSAL_S = 0.05
MORE_MB = 12  # most memory that the router may hold at the end, over that after the first third: heaps fill
OVERLOADS = [  # seconds, runs, and how many of 100 refusals must be quick; measurements: they want a quiet machine
    pytest.param(12.0, 3, 90, id="short", marks=[pytest.mark.long, pytest.mark.timeout(240)]),
    pytest.param(300.0, 1, 99, id="five-minutes", marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
]


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def small() -> AsyncIterator[LocalCluster]:
    """A verifier alone: what is measured is the router."""
    config = ClusterConfig(
        router=RouterConfig(
            listen="127.0.0.1:0", models={"target": MODELS / "target"}, queue=QUEUE, queue_per_tenant=QUEUE
        ),
        verifier=[VerifierConfig(model=MODELS / "target", dtype="float32", slots=SLOTS)],
    )
    async with LocalCluster(config, forward=lambda name, line: print(name, line)) as running:
        yield running


@dataclass
class Received:
    """What callers got, counted from a moment on."""

    since: float
    tokens: int = 0
    answers: int = 0
    refusals: list[float] = field(default_factory=list)  # seconds until each was answered

    async def ask(self, client: outrider.AsyncClient, prompt: str, seed: int) -> None:
        began = time.monotonic()
        try:
            async for chunk in client.stream(prompt, max_tokens=TOKENS, ignore_eos=True, seed=seed, timeout=60):
                if time.monotonic() >= self.since:
                    self.tokens += len(chunk.token_ids)
            self.answers += 1
        except Overloaded:
            if began >= self.since:
                self.refusals.append(time.monotonic() - began)


def held_mb(process_id: int) -> float:
    """What a process holds in memory."""
    pages = int(Path(f"/proc/{process_id}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def peak(client: outrider.AsyncClient, prompts: list[str]) -> float:
    """Tokens per second with a caller for each slot, who asks again as soon as he is answered."""
    received = Received(time.monotonic() + RAMP_S)
    end = received.since + PEAK_S

    async def caller(number: int) -> None:
        seed = number
        while time.monotonic() < end:
            await received.ask(client, prompts[seed % len(prompts)], seed)
            seed += SLOTS

    await asyncio.gather(*(caller(number) for number in range(SLOTS)))
    assert not received.refusals
    return received.tokens / (time.monotonic() - received.since)


@dataclass(frozen=True)
class Figures:
    """What one measurement gave."""

    rate: float  # requests per second
    peak: float  # tokens per second, and so is goodput
    goodput: float
    answers: int
    refusals: list[float]
    early_mb: float
    late_mb: float

    def refused_within(self, share: int) -> float:
        """Seconds within which `share` of 100 refusals were answered."""
        return quantiles(self.refusals, n=100)[share - 1]

    def __str__(self) -> str:
        return (
            f"| {self.rate:.0f} requests/s | peak {self.peak:.0f} tokens/s | goodput {self.goodput:.0f} "
            f"({self.goodput / self.peak:.0%}) | {self.answers} answers | {len(self.refusals)} refused, "
            f"median {median(self.refusals) * 1e3:.1f} ms, p90 {self.refused_within(90) * 1e3:.1f} ms, "
            f"p99 {self.refused_within(99) * 1e3:.1f} ms "
            f"| router {self.early_mb:.0f} -> {self.late_mb:.0f} MB |"
        )


async def overload(cluster: LocalCluster, prompts: list[str], seconds: float) -> Figures:
    """Measures the peak, then asks for several times as much."""
    dice = random.Random(7)
    router = cluster.processes["router"].pid
    async with outrider.AsyncClient(cluster.router_address, retries=0) as client:
        most = await peak(client, prompts)
        rate = TIMES * most / TOKENS
        received = Received(time.monotonic() + RAMP_S)
        end, early = received.since + seconds, 0.0
        running: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        while (now := time.monotonic()) < end:
            due += dice.expovariate(rate)
            await asyncio.sleep(max(0.0, due - now))
            task = asyncio.create_task(received.ask(client, dice.choice(prompts), dice.getrandbits(32)))
            running.add(task)
            task.add_done_callback(running.discard)
            if not early and now - received.since > seconds / 3:
                early = held_mb(router)
        goodput, late = received.tokens / (time.monotonic() - received.since), held_mb(router)
        await asyncio.gather(*running)
    return Figures(rate, most, goodput, received.answers, received.refusals, early, late)


@pytest.mark.parametrize(("seconds", "runs", "share"), OVERLOADS)
async def test_overload_costs_no_goodput_and_refusals_are_quick(
    small: LocalCluster, prompts: list[str], seconds: float, runs: int, share: int
) -> None:
    """By the median of all runs: the machine may have something else to do in one."""
    measured = []
    for _ in range(runs):
        measured.append(figures := await overload(small, prompts, seconds))
        print(f"\n{figures}")
        assert figures.late_mb - figures.early_mb <= MORE_MB
        assert len(figures.refusals) > figures.answers
    assert median(figures.goodput / figures.peak for figures in measured) >= 0.9
    assert median(figures.refused_within(share) for figures in measured) <= LONGEST_REFUSAL_S
