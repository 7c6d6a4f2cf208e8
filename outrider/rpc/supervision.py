"""Supervision of long-lived tasks: each has a name, and its unexpected end is logged and counted.

A task that can start again is run by `keep_running`, which restarts it after a backoff. A task without which the server
is useless is run by `run_required`: its end ends the process, which its supervisor starts again; a server that answers
calls but does not work would be worse than none.

For tests, the environment's OUTRIDER_FAIL_ONCE names tasks, as "NAME@FILE,NAME@FILE": each fails once, as soon as its
file exists, at the await where the task then is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from outrider.errors import InternalError, OutriderError
from outrider.rpc.backoff import Backoff
from outrider.rpc.lifecycle import FAIL_ONCE, task_group
from outrider.telemetry.lag import loop_lag
from outrider.telemetry.metrics import register_metric

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0  # between two runs of a task that fails repeatedly
FAULT_POLL_S = 0.02  # between two checks for a fault's file
STEADY_S = 60.0  # a task that ran for so long starts again with the first backoff

Work = Callable[[], Coroutine[Any, Any, object]]

log = logging.getLogger(__name__)

_ends: Counter[str] = Counter()  # unexpected ends of tasks, by name


class InjectedFault(Exception):
    """A fault that a test injects."""


class Tasks:
    """The long-lived tasks of a server."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group

    def keep_running(self, name: str, work: Work) -> None:
        """Start a task that `keep_running` runs."""
        self._group.create_task(keep_running(name, work), name=name)

    def run_required(self, name: str, work: Work) -> None:
        """Start a task that `run_required` runs."""
        self._group.create_task(run_required(name, work), name=name)


@asynccontextmanager
async def supervising() -> AsyncIterator[Tasks]:
    """Run a server's long-lived tasks beside a body that runs until it is cancelled. One more task measures the lag of
    the event loop. Raises the error of a required task."""
    register_metric("outrider.tasks.failed", lambda: dict(_ends))
    async with task_group() as group:
        tasks = Tasks(group)
        tasks.keep_running("loop lag", loop_lag().run)
        yield tasks


async def keep_running(name: str, work: Work) -> None:
    """Run `work()` until cancelled; run it again, after a backoff, whenever it fails or ends."""
    backoff = Backoff(MIN_BACKOFF_S, MAX_BACKOFF_S, steady_s=STEADY_S)
    while True:
        began = time.monotonic()
        error = await _run_to_end(name, work)
        backoff.ended_after(time.monotonic() - began)
        _log_end(name, error, f"it is started again in {backoff.next_s:g} s")
        await backoff.wait()


async def run_required(name: str, work: Work) -> None:
    """Run `work()` until cancelled. Raises its error, and InternalError if it ends: in a server's task group either
    ends the process."""
    error = await _run_to_end(name, work)
    _log_end(name, error, "the process ends, because it cannot work without it")
    raise error


async def _run_to_end(name: str, work: Work) -> Exception:
    """Run the work and return its error. A cancellation is raised only if this task itself is cancelled."""
    _ends[name] += 0  # a rate in Prometheus needs a zero to start from
    try:
        await _with_fault(name, work())
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return InternalError(f"task {name!r} was cancelled by something that it waited for")
    except Exception as error:
        return error
    return InternalError(f"task {name!r} has come to an end")


def _log_end(name: str, error: Exception, consequence: str) -> None:
    _ends[name] += 1
    if isinstance(error, OutriderError):
        log.error("task %r: %s; %s", name, error, consequence)
    else:
        log.error("task %r failed; %s", name, consequence, exc_info=error)


def _with_fault(name: str, work: Coroutine[Any, Any, object]) -> Awaitable[object]:
    """Return the work itself, unless a test injects a fault into it."""
    file = _faults().pop(name, None)
    return work if file is None else _Failing(name, work, file)


class _Failing:
    """Work in which an InjectedFault is raised, at its present await, when `file` appears."""

    def __init__(self, name: str, work: Coroutine[Any, Any, object], file: str) -> None:
        self._name = name
        self._work = work
        self._file = file

    async def _inject(self, task: asyncio.Task[Any]) -> None:
        while not os.path.exists(self._file):  # noqa: ASYNC240 (for tests alone)
            await asyncio.sleep(FAULT_POLL_S)
        task.cancel(self)

    def __await__(self) -> Generator[Any, Any, object]:
        task = asyncio.current_task()
        assert task is not None
        injection = asyncio.create_task(self._inject(task))
        inner, sent = self._work.__await__(), None
        error: BaseException | None = None
        try:
            while True:
                waits = inner.send(sent) if error is None else inner.throw(error)
                error = sent = None
                try:
                    sent = yield waits
                except BaseException as thrown:
                    error = thrown
                    if isinstance(thrown, asyncio.CancelledError) and thrown.args == (self,):
                        task.uncancel()
                        error = InjectedFault(self._name)
        except StopIteration as end:
            return end.value
        finally:
            injection.cancel()


@cache
def _faults() -> dict[str, str]:
    """Return the files of faults that were not injected yet, by task. Read when the first task starts: a server's
    modules may have been loaded before its environment was set."""
    entries = (entry.partition("@") for entry in os.environ.get(FAIL_ONCE, "").split(",") if entry)
    return {name: file for name, _, file in entries}
