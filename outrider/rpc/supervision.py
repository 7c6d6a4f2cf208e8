"""Long-lived tasks under supervision: each has a name, and its end is logged, counted, and never goes unnoticed.

A task that can begin anew is `kept`: it is run again after a backoff. One that the server is nothing without is
`needed`: its end ends the process, which whoever started it starts again; a server that answers and does not work
would be worse than none.

For tests, the environment's OUTRIDER_FAIL_ONCE names tasks, as "NAME@FILE,NAME@FILE": each fails once, as soon as its
file is there, at the await where it then is.
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
from outrider.rpc.lifecycle import FAIL_ONCE, alongside
from outrider.telemetry.lag import loop_lag
from outrider.telemetry.metrics import watch

FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 5.0  # between two runs of a task that fails again and again
LOOK_S = 0.02  # between two looks for a fault's file
STEADY_S = 60.0  # a task that ran for so long is run again as if it were the first time

Work = Callable[[], Coroutine[Any, Any, object]]

log = logging.getLogger(__name__)

_ends: Counter[str] = Counter()  # of tasks that should not have ended, by name


class InjectedFault(Exception):
    """A fault that a test has asked for."""


class Tasks:
    """The long-lived tasks of a server."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group

    def keep(self, name: str, work: Work) -> None:
        """Has `kept` run it."""
        self._group.create_task(kept(name, work), name=name)

    def need(self, name: str, work: Work) -> None:
        """Has `needed` run it."""
        self._group.create_task(needed(name, work), name=name)


@asynccontextmanager
async def supervising() -> AsyncIterator[Tasks]:
    """A server's long-lived tasks, beside a body that runs until it is cancelled. One of them measures the lag of the
    event loop. Raises what a task fails with that is needed."""
    watch("outrider.tasks.failed", lambda: dict(_ends))
    async with alongside() as group:
        tasks = Tasks(group)
        tasks.keep("loop lag", loop_lag().run)
        yield tasks


async def kept(name: str, work: Work) -> None:
    """Runs `work()` until cancelled: again, after a pause, whenever it fails or ends."""
    pause = FIRST_PAUSE_S
    while True:
        began = time.monotonic()
        error = await _end(name, work)
        if time.monotonic() - began > STEADY_S:
            pause = FIRST_PAUSE_S
        _note(name, error, f"it is started again in {pause:g} s")
        await asyncio.sleep(pause)
        pause = min(LAST_PAUSE_S, 2 * pause)


async def needed(name: str, work: Work) -> None:
    """Runs `work()` until cancelled. Raises what it raises, and InternalError where it ends: in a server's task group
    either ends the process."""
    error = await _end(name, work)
    _note(name, error, "the process ends, because it cannot work without it")
    raise error


async def _end(name: str, work: Work) -> Exception:
    """Runs it, and returns how it ended. A cancellation is passed on only if it is our own task that is cancelled."""
    _ends[name] += 0  # a rate needs a zero to rise from
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


def _note(name: str, error: Exception, consequence: str) -> None:
    _ends[name] += 1
    if isinstance(error, OutriderError):
        log.error("task %r: %s; %s", name, error, consequence)
    else:
        log.error("task %r failed; %s", name, consequence, exc_info=error)


def _with_fault(name: str, work: Coroutine[Any, Any, object]) -> Awaitable[object]:
    """The work itself, unless a test wants it to fail."""
    file = _faults().pop(name, None)
    return work if file is None else _Failing(name, work, file)


class _Failing:
    """Work that an InjectedFault is raised in, at the await where it is when `file` comes into being."""

    def __init__(self, name: str, work: Coroutine[Any, Any, object], file: str) -> None:
        self._name = name
        self._work = work
        self._file = file

    async def _strike(self, task: asyncio.Task[Any]) -> None:
        while not os.path.exists(self._file):  # noqa: ASYNC240 (for tests alone)
            await asyncio.sleep(LOOK_S)
        task.cancel(self)

    def __await__(self) -> Generator[Any, Any, object]:
        task = asyncio.current_task()
        assert task is not None
        striking = asyncio.create_task(self._strike(task))
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
            striking.cancel()


@cache
def _faults() -> dict[str, str]:
    """The files of tasks that are still to fail, by their names. Read when the first one starts: a server's modules may
    have been loaded before its environment was there."""
    entries = (entry.partition("@") for entry in os.environ.get(FAIL_ONCE, "").split(",") if entry)
    return {name: file for name, _, file in entries}
