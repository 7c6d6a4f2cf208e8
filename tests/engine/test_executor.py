"""What is asked of an engine between two passes is done in that order, before the next one, by that engine alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from outrider.engine import executor as executors
from outrider.engine.executor import Executor
from outrider.engine.kv.kv_slots import AcquiredSlot

ROWS = np.arange(2)


class Engine:
    """Writes down what it is asked for."""

    def __init__(self, seconds: float = 0.0) -> None:
        """`seconds`: that a pass takes."""
        self.asked: list[tuple[Any, ...]] = []
        self.threads: list[threading.Thread] = []  # of passes
        self._seconds = seconds

    def copy(self, source: int, target: int, rows: int) -> None:
        self.asked.append(("copy", source, target, rows))

    def release(self, slot: int, rows: int) -> None:
        self.asked.append(("release", slot, rows))

    def move(self, slot: int, *_: object) -> None:
        self.asked.append(("move", slot))

    def sample(self, *_: object) -> None:
        self.asked.append(("sample",))
        self.threads.append(threading.current_thread())
        time.sleep(self._seconds)

    def close(self) -> None:
        self.asked.append(("close",))


class Rig:
    def __init__(self) -> None:
        self.engine = Engine()
        self.executor = Executor(self.engine)  # type: ignore[arg-type]

    async def sample(self) -> None:
        await self.executor.sample([], [], lambda: None)


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    rig.executor.close()


async def test_copies_and_moves_run_in_order_before_the_pass(rig: Rig) -> None:
    rig.executor.move(1, ROWS, ROWS)
    rig.executor.prepare_slot(AcquiredSlot(2, 30, 1))
    rig.executor.prepare_slot(AcquiredSlot(3, 30, None))  # it has what it needs
    rig.executor.move(2, ROWS, ROWS)
    rig.executor.release(3, 7)
    await rig.sample()
    await rig.sample()
    filled = [("release", 2, 0), ("copy", 1, 2, 30), ("release", 3, 30)]
    assert rig.engine.asked == [("move", 1), *filled, ("move", 2), ("release", 3, 7), ("sample",), ("sample",)]


async def test_queued_calls_run_at_once_when_the_caller_asks_for_it(rig: Rig) -> None:
    rig.executor.move(1, ROWS, ROWS)
    rig.executor.run_queued()
    assert rig.engine.asked == [("move", 1)]
    await rig.sample()
    assert rig.engine.asked == [("move", 1), ("sample",)]


async def test_a_call_between_passes_runs_in_order(rig: Rig) -> None:
    rig.executor.move(1, ROWS, ROWS)
    rig.executor.enqueue(lambda: rig.engine.asked.append(("later",)))
    assert await rig.executor.call(lambda: len(rig.engine.asked)) == 2
    assert rig.engine.asked == [("move", 1), ("later",)]


async def test_a_flush_runs_calls_queued_before_and_meanwhile_in_the_pass_thread(rig: Rig) -> None:
    threads: list[threading.Thread] = []
    loop = asyncio.get_running_loop()

    def late() -> None:
        threads.append(threading.current_thread())

    def early() -> None:
        late()
        loop.call_soon_threadsafe(rig.executor.enqueue, late)  # before the result of the call is there

    rig.executor.enqueue(early)
    await rig.executor.flush()
    assert len(threads) == 2
    assert threading.main_thread() not in threads
    await rig.sample()
    assert len(threads) == 2


async def test_a_short_pass_with_a_copy_before_it_runs_in_another_thread(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "INLINE_S", 60.0)
    for _ in range(3):
        await rig.sample()
    rig.executor.prepare_slot(AcquiredSlot(2, 30, 1))
    await rig.sample()
    await rig.sample()
    assert [thread is threading.current_thread() for thread in rig.engine.threads[1:]] == [True, True, False, True]


@pytest.mark.parametrize(("seconds", "limit", "here"), [(0.0, 60.0, [False, True, True]), (0.02, 0.01, [False] * 3)])
async def test_short_passes_run_in_the_calling_thread_and_long_ones_in_another(
    monkeypatch: pytest.MonkeyPatch, seconds: float, limit: float, here: list[bool]
) -> None:
    monkeypatch.setattr(executors, "INLINE_S", limit)
    engine = Engine(seconds)
    executor = Executor(engine)  # type: ignore[arg-type]
    turns = [0]

    async def others() -> None:
        while True:
            await asyncio.sleep(0)
            turns.append(len(engine.threads))

    beside = asyncio.create_task(others())
    for _ in here:
        await executor.sample([], [], lambda: None)
    beside.cancel()
    executor.close()
    assert [thread is threading.current_thread() for thread in engine.threads] == here
    assert {1, 2, 3} <= {*turns}  # other tasks run behind each


async def test_calls_queued_for_a_replaced_engine_are_dropped(rig: Rig) -> None:
    before, rig.engine = rig.engine, Engine()
    rig.executor.prepare_slot(AcquiredSlot(2, 30, 1))
    rig.executor.replace_engine(rig.engine)  # type: ignore[arg-type]
    await rig.sample()
    assert before.asked == [("close",)]
    assert rig.engine.asked == [("sample",)]


async def test_what_is_computed_from_logits_never_holds_up_the_loop(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "INLINE_S", 10.0)
    for _ in range(3):
        await rig.sample()
    found: list[threading.Thread] = []
    await rig.executor.sample([], [], lambda: None, then=lambda logits: found.append(threading.current_thread()))
    assert rig.engine.threads[-2] is threading.current_thread()
    assert rig.engine.threads[-1] is found[0] is not threading.current_thread()
