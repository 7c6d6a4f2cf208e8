"""Supervision of long-lived tasks: each has a name, and its unexpected end is logged and counted.

A task that can start again is run by `keep_running`, which restarts it after a backoff. A task without which the server
is useless is run by `run_required`: its end ends the process, which its supervisor starts again; a server that answers
calls but does not work would be worse than none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from outrider.errors import InternalError, OutriderError
from outrider.rpc.backoff import Backoff
from outrider.rpc.lifecycle import task_group
from outrider.telemetry.lag import loop_lag
from outrider.telemetry.metrics import register_metric

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0  # between two runs of a task that fails repeatedly
STEADY_S = 60.0  # a task that ran for this time starts again with the first backoff

Work = Callable[[], Coroutine[Any, Any, object]]

log = logging.getLogger(__name__)

unexpected_ends: Counter[str] = Counter()  # of tasks, by name


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
    register_metric("outrider.tasks.failed", lambda: dict(unexpected_ends))
    async with task_group() as group:
        tasks = Tasks(group)
        tasks.keep_running("loop lag", loop_lag().run)
        yield tasks


async def keep_running(name: str, work: Work) -> None:
    """Run `work()` until cancelled; run it again, after a backoff, whenever it fails or ends."""
    backoff = Backoff(MIN_BACKOFF_S, MAX_BACKOFF_S, steady_s=STEADY_S)
    while True:
        began = time.monotonic()
        error = await run_to_end(name, work)
        backoff.ended_after(time.monotonic() - began)
        _log_end(name, error, f"it is started again in {backoff.next_s:g} s")
        await backoff.wait()


async def run_required(name: str, work: Work) -> None:
    """Run `work()` until cancelled. Raises its error, and InternalError if it ends: in a server's task group either
    ends the process."""
    error = await run_to_end(name, work)
    _log_end(name, error, "the process ends, because it cannot work without it")
    raise error


async def run_to_end(name: str, work: Work) -> Exception:
    """Run the work and return its error. A cancellation is raised only if this task itself is cancelled."""
    unexpected_ends[name] += 0  # a rate in Prometheus needs a zero to start from
    try:
        await work()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return InternalError(f"task {name!r} was cancelled by something that it waited for")
    except Exception as error:
        return error
    return InternalError(f"task {name!r} has come to an end")


def _log_end(name: str, error: Exception, consequence: str) -> None:
    unexpected_ends[name] += 1
    if isinstance(error, OutriderError):
        log.error("task %r: %s; %s", name, error, consequence)
    else:
        log.error("task %r failed; %s", name, consequence, exc_info=error)
