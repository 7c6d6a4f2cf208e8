"""Every process is replaced while sessions run: a new one starts, the old one gets SIGTERM, and no session notices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

import outrider
from outrider.config import DrafterConfig, RouterConfig, Section, VerifierConfig
from outrider.fleet.process import Process, Role
from outrider.store.redis.embedded import EmbeddedRedis
from tests.e2e.conftest import MODELS
from tests.e2e.test_faults import free_port

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

SLOTS = 12
RESTARTS = [  # sessions at once, what is replaced, and moves that the SDK must have seen: the routers' own, at least
    pytest.param(4, ("router", "verifier", "drafter", "router"), 1, id="one-of-each"),
    pytest.param(SLOTS, ("router", "verifier", "drafter") * 2, SLOTS, id="all", marks=pytest.mark.long),
]
TOKENS = 300
DRAIN_S = 30.0  # longer than any of them takes on a busy machine
MODEL = MODELS / "drafter"  # small, so that the test is quick; what drafts for it has none, for the same reason


@dataclass
class Servers:
    """Two of each role, and what replaces them."""

    redis_url: str
    address: str  # of all routers that there ever are
    ports: list[int]  # of routers that have not started yet
    running: dict[Role, list[Process]] = field(default_factory=dict)

    async def start(self, role: Role) -> None:
        sections: dict[Role, Section] = {
            "verifier": VerifierConfig(
                model=MODEL, dtype="float32", numerics="invariant", slots=SLOTS, drain_s=DRAIN_S
            ),
            "drafter": DrafterConfig(model=MODEL, drafts="suffix", slots=2 * SLOTS, drain_s=DRAIN_S),
        }
        if role == "router":
            listen = f"127.0.0.1:{self.ports.pop(0)}"
            sections[role] = RouterConfig(listen=listen, models={"drafter": MODEL}, drain_s=DRAIN_S)
        name = f"{role}-{len(self.ports)}-{len(self.running.get(role, ()))}"
        process = Process(role, name, sections[role], forward=lambda name, line: print(name, line))
        await process.start(self.redis_url)
        self.running.setdefault(role, []).append(process)

    async def replace(self, role: Role) -> float:
        """Replaces the oldest; how long it took to end, in seconds."""
        await self.start(role)
        old = self.running[role].pop(0)
        began = time.monotonic()
        await old.stop()
        assert old.status == 0, f"{old.name} ended with {old.status}"
        return time.monotonic() - began

    async def stop(self) -> None:
        await asyncio.gather(*(process.stop() for processes in self.running.values() for process in processes))


@pytest_asyncio.fixture(loop_scope="session")
async def servers() -> AsyncIterator[Servers]:
    ports = [free_port() for _ in range(4)]
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis())
        address = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
        servers = Servers(redis.url, address, ports)
        stack.push_async_callback(servers.stop)
        roles: tuple[Role, ...] = ("verifier", "drafter", "router")
        await asyncio.gather(*(servers.start(role) for role in roles for _ in range(2)))
        yield servers


@pytest.mark.parametrize(("sessions", "replaced", "moves"), RESTARTS)
async def test_all_servers_are_replaced_under_running_sessions_without_changing_a_text(
    servers: Servers, prompts: list[str], sessions: int, replaced: tuple[Role, ...], moves: int
) -> None:
    async with outrider.AsyncClient(servers.address) as client:

        async def answer(number: int) -> outrider.Generation:
            return await client.generate(
                prompts[number % len(prompts)],
                temperature=(0.0, 0.8, 1.0)[number % 3],
                seed=number,
                max_tokens=TOKENS,
                ignore_eos=True,
                timeout=120,
            )

        undisturbed = [(await answer(number)).token_ids for number in range(sessions)]
        done = asyncio.Event()
        answers: list[outrider.Generation] = []

        async def ask_on(number: int) -> None:
            while not done.is_set():
                result = await answer(number)
                answers.append(result)
                assert result.token_ids == undisturbed[number]
                assert result.finish_reason == "length"

        async def restart() -> dict[Role, list[float]]:
            took: dict[Role, list[float]] = {"router": [], "verifier": [], "drafter": []}
            for role in replaced:
                took[role].append(await servers.replace(role))
            done.set()
            return took

        async with asyncio.TaskGroup() as group:
            restarting = group.create_task(restart())
            for number in range(sessions):
                group.create_task(ask_on(number))
    took = restarting.result()
    print({role: [round(seconds, 2) for seconds in times] for role, times in took.items()})
    print(f"{len(answers)} answers, {sum(answer.resumes for answer in answers)} moves seen by the SDK")
    assert sum(answer.resumes for answer in answers) >= moves
    assert max(answer.resumes for answer in answers) <= 4
    assert max(map(max, took.values())) < DRAIN_S / 2  # no server waited for its drain to run out
