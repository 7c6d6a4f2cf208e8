"""Sessions that are cancelled at any moment, in a queue and before the first token too: no server computes for them."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import pytest_asyncio

import outrider
from outrider.errors import Cancelled, DeadlineExceeded, NotFound, Overloaded, Unavailable
from outrider.fleet.cluster import LocalCluster
from router.server import run
from tests.e2e.leaks import forgetful, nothing_left, resident
from tests.e2e.tiny_models import make_tiny
from tests.hostile.rig import resident_bytes, serving

pytestmark = pytest.mark.asyncio(loop_scope="session")

SLOTS = 4
AT_ONCE = 12  # so that most wait
TOKENS = 100  # of an answer
LONGEST_S = 0.4  # longest life of a session that need not have a token first
LEVEL = 1_000  # after this many, heaps have filled as much as they do
MORE_MB = 25  # most memory that a process may hold more than after a fifth of them
COUNTS = [
    pytest.param(200, id="200"),
    pytest.param(10_000, id="10000", marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
]


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def tiny(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """A tiny target that drafts for itself."""
    model = make_tiny(tmp_path_factory.mktemp("tiny"), layers=2, width=32)
    config = forgetful(model, "tiny", SLOTS)
    async with LocalCluster(config, forward=lambda name, line: print(name, line)) as running:
        yield running


async def cancelled(client: outrider.AsyncClient, number: int, waits: list[float]) -> str:
    """One that does not come to its end, as a rule: how, and how far it got.

    Every second one has a token first, however busy the machine is; a deadline is about as far away as first tokens
    are now. `waits` are the seconds that these took.
    """
    dice = random.Random(number)
    moment = dice.uniform(0, LONGEST_S)
    way = ("closed", "left", "by name", "deadline")[number % 4]
    midway = number // 4 % 2 == 1
    if midway and way == "deadline" and waits:
        moment = dice.uniform(1, 2) * statistics.median(waits[-20:])
    session = (await client.create_session()).session_id if way == "by name" else ""
    stream = client.stream(
        "w1 w2 w3",
        session=session,
        max_tokens=TOKENS,
        seed=number,
        ignore_eos=True,
        timeout=max(moment, 0.001) if way == "deadline" else 30,
    )
    received = 0
    began, begun = time.monotonic(), asyncio.Event()

    async def read() -> None:
        nonlocal received
        async for chunk in stream:
            if not received:
                waits.append(time.monotonic() - began)
            received += len(chunk.token_ids)
            begun.set()

    reading = asyncio.create_task(read())
    if way != "deadline":
        if midway:
            await asyncio.wait({reading, starting := asyncio.create_task(begun.wait())}, return_when="FIRST_COMPLETED")
            starting.cancel()
        await asyncio.sleep(moment / 20 if midway else moment)
    match way:
        case "closed":
            await stream.cancel()
        case "left":
            reading.cancel()
        case "by name":
            with suppress(NotFound):  # it may have been forgotten already
                await client.cancel(session)
                assert not (await client.get_session(session)).running
    with suppress(Cancelled, DeadlineExceeded, Overloaded, Unavailable, asyncio.CancelledError):
        await asyncio.wait_for(reading, 10)
    if received == TOKENS:
        return "whole"
    return f"{way} {'midway' if received else 'before its first token'}"


@pytest.mark.parametrize("count", COUNTS)
async def test_cancelled_generations_stop_computing_and_leave_nothing(tiny: LocalCluster, count: int) -> None:
    router = tiny.processes["router"].section.model_copy(update={"listen": "127.0.0.1:0"})
    ends, held, waits = Counter[str](), list[dict[str, float]](), list[float]()
    # One router more, in this process, so that its tasks can be counted.
    async with serving(run, router, tiny.redis_url) as address, outrider.AsyncClient(address) as client:
        numbers = iter(range(10**9))

        async def caller(end: int) -> None:
            while (number := next(numbers)) < end:
                ends[await cancelled(client, number, waits)] += 1
                if number % max(1, count // 20) == 0:
                    held.append(resident(tiny) | {"the router in here": resident_bytes() / 1e6})

        async def callers(end: int) -> None:
            await asyncio.gather(*(caller(end) for _ in range(AT_ONCE)))

        async with nothing_left(tiny, lambda: callers(50)):
            await callers(50 + count)
        await asyncio.gather(*(client.generate("w1", max_tokens=4, timeout=30) for _ in range(SLOTS)))
    print(dict(ends), [{name: round(mb) for name, mb in some.items()} for some in (held[0], held[-1])])
    ways = ("closed", "left", "by name", "deadline")
    for way in ways:
        for when in ("midway", "before its first token"):
            assert ends[f"{way} {when}"] > count / 100, ends
    assert ends["whole"] < count / 4
    for name, first in held[len(held) // 5].items() if count > LEVEL else ():
        assert held[-1][name] <= first + MORE_MB, (name, [round(some[name]) for some in held])
