"""Turns at work: who is next, what a cancelled caller leaves behind, and how much may wait."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from outrider.errors import Overloaded
from outrider.limits import fair_turns
from outrider.limits.fair_turns import ROUND_S, FairTurns, LoopTurns


class Work:
    """Work in one thread that ends when the test allows it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turns = FairTurns(1, "the work", lambda: self.now)
        self.done: list[str] = []
        self._may_end = threading.Semaphore(0)
        self._executor = ThreadPoolExecutor(1)

    def begin(self, name: str, tenant: str, seconds: float = 1.0) -> asyncio.Task[str]:
        return asyncio.create_task(self.turns.run(self._executor, tenant, self._work, name, seconds))

    async def end(self, count: int = 1) -> None:
        before = len(self.done)
        self._may_end.release(count)
        while len(self.done) < before + count:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)

    def _work(self, name: str, seconds: float) -> str:
        assert self._may_end.acquire(timeout=30)
        self.now += seconds
        self.done.append(name)
        return name


@pytest.fixture
def work() -> Work:
    return Work()


async def test_the_tenant_that_took_the_fewest_seconds_is_next(work: Work) -> None:
    first = work.begin("a1", "a", 9.0)
    await asyncio.sleep(0)
    tasks = [work.begin(name, name[0], 2.0) for name in ("a2", "a3", "b1", "b2")]
    await asyncio.sleep(0)
    await work.end(5)
    assert work.done == ["a1", "b1", "b2", "a2", "a3"]
    assert await first == "a1"
    assert [await task for task in tasks] == ["a2", "a3", "b1", "b2"]


async def test_running_work_continues_when_its_caller_leaves(work: Work) -> None:
    """Or a caller that cancels at once could fill the thread's own queue."""
    running, waiting, last = (work.begin(name, "a") for name in ("running", "waiting", "last"))
    await asyncio.sleep(0.01)
    running.cancel()
    waiting.cancel()
    await asyncio.sleep(0.01)
    assert running.cancelled()
    assert not last.done()
    await work.end(2)
    assert work.done == ["running", "last"]
    assert await last == "last"
    for name in ("a1", "a2", "b1"):
        work.begin(name, name[0])
        await asyncio.sleep(0)
    await work.end(3)
    assert work.done[2:] == ["a1", "b1", "a2"]  # still one at a time


async def test_a_tenants_waiting_calls_are_bounded_and_others_may_wait(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_turns, "MAX_WAITING", 2)
    tasks = [work.begin(str(number), "a") for number in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="2 of your requests wait for the work; retry in 1 s"):
        await work.begin("3", "a")
    other = work.begin("other", "b")
    await asyncio.sleep(0)
    await work.end(4)
    assert sorted(work.done) == ["0", "1", "2", "other"]
    await asyncio.gather(*tasks, other)


class Pieces:
    """Work of several callers in the event loop; the clock is its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turns = LoopTurns(lambda: self.now)
        self.done: list[str] = []

    async def call(self, name: str, count: int, seconds: float = 1.0) -> None:
        for _ in range(count):
            await self.turns.run(name[0], self._piece, name, seconds)

    def _piece(self, name: str, seconds: float) -> None:
        self.now += seconds
        self.done.append(name)


@pytest.mark.parametrize("at_a_time", [1, 3])
async def test_the_event_loop_runs_after_a_bounded_time_of_work(at_a_time: int) -> None:
    pieces = Pieces()
    calls = [asyncio.create_task(pieces.call(f"a{number}", 4, 1.01 * ROUND_S / at_a_time)) for number in range(5)]
    at_once, before = [], 0
    while not all(call.done() for call in calls):
        await asyncio.sleep(0)
        at_once.append(len(pieces.done) - before)
        before = len(pieces.done)
    assert before == 5 * 4
    assert max(at_once) == at_a_time


async def test_a_tenant_with_many_callers_has_at_most_two_turns_between_those_of_a_single_caller() -> None:
    pieces = Pieces()
    many = [asyncio.create_task(pieces.call(f"a{number}", 10)) for number in range(20)]
    await asyncio.sleep(0)
    await pieces.call("b", 10)
    assert "aaa" not in "".join(name[0] for name in pieces.done[1:])
    await asyncio.gather(*many)


async def test_a_failing_piece_and_a_cancelled_caller_pass_the_turn_on() -> None:
    pieces = Pieces()
    failing = asyncio.create_task(pieces.turns.run("a", lambda: 1 / 0))
    waiting = asyncio.create_task(pieces.call("a", 1))
    last = asyncio.create_task(pieces.call("b", 1))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(ZeroDivisionError):
        await failing
    await last
    assert pieces.done == ["b"]
    await pieces.call("a", 2)
    assert pieces.done == ["b", "a", "a"]
