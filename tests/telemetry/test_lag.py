"""The lag of an event loop is seen, and only what the process did itself is a stall."""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from _pytest.outcomes import Failed

from outrider.telemetry.lag import LONG_STALL_S, STALL_S, LoopLag
from tests.loops import no_stall

on_linux = pytest.mark.skipif(
    not os.path.exists("/proc/thread-self/schedstat"), reason="Linux tells how long threads wait"
)


def keep_busy(seconds: float) -> None:
    """Holds the processor for `seconds`."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def test_a_callback_that_takes_long_is_a_stall(caplog: pytest.LogCaptureFixture) -> None:
    recorded: list[float] = []
    lag = LoopLag(recorded.append, beat_s=0.005)
    measuring = asyncio.create_task(lag.run())
    await asyncio.sleep(0.05)
    with caplog.at_level(logging.INFO):
        keep_busy(0.3)
        await asyncio.sleep(0.05)
    assert lag.stalls == 1
    assert 0.25 < lag.longest_s < 0.6
    assert max(recorded) >= 0.25
    assert not caplog.text, "a short one is a figure, and no line in a user's terminal"
    with caplog.at_level(logging.INFO):
        keep_busy(LONG_STALL_S + 0.1)
        await asyncio.sleep(0.05)
    measuring.cancel()
    assert "the event loop stood still for" in caplog.text


async def test_a_test_whose_event_loop_stalls_fails_and_names_the_function() -> None:
    with pytest.raises(Failed, match=r"stood still(?s:.*)in keep_busy"):
        async with no_stall():
            keep_busy(0.8)  # beside other processes less may escape a timer of processor time


async def test_many_short_callbacks_are_no_stall() -> None:
    async with no_stall() as lag:
        for _ in range(60):
            keep_busy(0.01)
            await asyncio.sleep(0)
    assert lag.stalls == 0


async def test_a_thread_that_holds_the_interpreter_lock_causes_a_stall() -> None:
    text = json.dumps(list(range(3_000_000)))
    with pytest.raises(Failed, match="stood still"):
        async with no_stall():
            await asyncio.to_thread(json.loads, text)  # in C, without giving others a turn


@on_linux
async def test_work_in_a_thread_that_releases_the_interpreter_lock_is_no_stall() -> None:
    """Though it may have to wait for a core while it has the interpreter's lock, and the loop then waits with it."""
    lag = LoopLag(beat_s=0.005)
    measuring = asyncio.create_task(lag.run())
    await asyncio.sleep(0.02)
    await asyncio.to_thread(keep_busy, 0.5)
    await asyncio.sleep(0.05)
    measuring.cancel()
    assert lag.stalls == 0, lag.longest_s


@on_linux
async def test_a_thread_that_waits_for_a_core_with_the_interpreters_lock_makes_no_stall() -> None:
    """Its core is shared with many others, so what it does in C for 15 ms takes far longer. The loop may wait for a
    core itself, so that more than one such call falls into one lag."""
    core = min(os.sched_getaffinity(0))
    text = json.dumps(list(range(150_000)))

    def work() -> None:
        os.sched_setaffinity(0, {core})  # of this thread alone
        for _ in range(5):
            json.loads(text)

    recorded: list[float] = []
    neighbours = [multiprocessing.get_context("fork").Process(target=_share, args=(core, 60.0)) for _ in range(16)]
    for neighbour in neighbours:
        neighbour.start()
    try:
        with ThreadPoolExecutor(1) as thread:
            lag = LoopLag(recorded.append, beat_s=0.005)
            measuring = asyncio.create_task(lag.run())
            await asyncio.sleep(0.02)
            await asyncio.get_running_loop().run_in_executor(thread, work)
            await asyncio.sleep(0.05)
            measuring.cancel()
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.join()
    assert max(recorded) > STALL_S
    assert lag.stalls == 0, lag.longest_s


@on_linux
async def test_a_busy_machine_makes_lag_and_no_stall() -> None:
    """Many processes share this loop's core, so what it does for 30 ms takes far longer."""
    core = min(os.sched_getaffinity(0))
    allowed = os.sched_getaffinity(0)
    neighbours = [multiprocessing.get_context("fork").Process(target=_share, args=(core, 1.5)) for _ in range(8)]
    for neighbour in neighbours:
        neighbour.start()
    os.sched_setaffinity(0, {core})
    recorded: list[float] = []
    try:
        lag = LoopLag(recorded.append)
        measuring = asyncio.create_task(lag.run())
        await asyncio.sleep(0.1)
        for _ in range(5):
            keep_busy(0.03)
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        measuring.cancel()
    finally:
        os.sched_setaffinity(0, allowed)
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.join()
    assert max(recorded) > STALL_S
    assert lag.stalls == 0, lag.longest_s
    assert 0.1 < lag.ran_s < 0.5
    assert lag.waited_s > 2 * lag.ran_s


def _share(core: int, seconds: float) -> None:
    os.sched_setaffinity(0, {core})
    keep_busy(seconds)
