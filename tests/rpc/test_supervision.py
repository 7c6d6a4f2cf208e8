"""A task's end is logged and counted, and it is run again, or ends what needs it."""

from __future__ import annotations

import asyncio
import logging

import pytest

from outrider.errors import InternalError
from outrider.rpc import supervision
from outrider.rpc.supervision import keep_running, supervising


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "MIN_BACKOFF_S", 0.01)
    monkeypatch.setattr(supervision, "MAX_BACKOFF_S", 0.02)
    monkeypatch.setattr(supervision, "unexpected_ends", supervision.Counter())


def ends(name: str) -> int:
    return supervision.unexpected_ends[name]


async def test_a_task_that_fails_or_returns_runs_again(caplog: pytest.LogCaptureFixture) -> None:
    runs: list[int] = []
    goes_on = asyncio.Event()

    async def work() -> None:
        runs.append(len(runs))
        if len(runs) == 1:
            raise AttributeError("'NoneType' object has no attribute 'WhichOneof'")
        if len(runs) == 2:
            return
        goes_on.set()
        await asyncio.Event().wait()

    with caplog.at_level(logging.ERROR):
        task = asyncio.create_task(keep_running("chore", work))
        async with asyncio.timeout(5):
            await goes_on.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert len(runs) == 3
    assert ends("chore") == 2
    assert "task 'chore' failed; it is started again in 0.01 s" in caplog.text
    assert "WhichOneof" in caplog.text
    assert "task 'chore' has come to an end; it is started again in 0.02 s" in caplog.text


async def test_a_foreign_cancellation_does_not_end_a_task_silently() -> None:
    """As where a call is cancelled that the task reads from: CancelledError comes, and the task was not cancelled."""
    runs = 0
    goes_on = asyncio.Event()

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs > 1:
            goes_on.set()
            await asyncio.Event().wait()
        asyncio.get_running_loop().call_soon((never := asyncio.get_running_loop().create_future()).cancel)
        await never

    task = asyncio.create_task(keep_running("chore", work))
    async with asyncio.timeout(5):
        await goes_on.wait()
    assert ends("chore") == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("fails", [True, False])
async def test_the_end_of_a_required_task_ends_the_server(fails: bool) -> None:
    async def work() -> None:
        await asyncio.sleep(0.01)
        if fails:
            raise ZeroDivisionError

    async def server() -> None:
        async with supervising() as tasks:
            tasks.run_required("heart", work)
            await asyncio.Event().wait()

    with pytest.raises(ZeroDivisionError if fails else InternalError):
        async with asyncio.timeout(5):
            await server()
    assert ends("heart") == 1


async def test_a_cancelled_server_leaves_no_task_and_counts_no_failure() -> None:
    async def server() -> None:
        async with supervising() as tasks:
            tasks.keep_running("chore", asyncio.Event().wait)
            tasks.run_required("heart", asyncio.Event().wait)
            await asyncio.Event().wait()

    before = asyncio.all_tasks()
    task = asyncio.create_task(server())
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert asyncio.all_tasks() == before
    assert ends("chore") == ends("heart") == 0
