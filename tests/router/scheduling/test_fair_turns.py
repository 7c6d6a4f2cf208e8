"""Turns at long work: who is next, what a cancelled caller leaves behind, and how much may wait."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from outrider.errors import Overloaded
from router.scheduling import fair_turns
from router.scheduling.fair_turns import FairTurns


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


async def test_work_that_has_begun_keeps_its_place_when_its_caller_goes(work: Work) -> None:
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
    assert work.turns._free == 1


async def test_a_tenant_has_at_most_so_many_waiting_and_others_still_may(
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
