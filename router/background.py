"""Background tasks: work that outlives the call that started it, but not the router."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from outrider.errors import OutriderError, Superseded

log = logging.getLogger(__name__)


class BackgroundTasks:
    """Tasks that run in the background until `drain`. An exception of a task is logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start `work` as a task and return the task, which may be cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def drain(self, within_s: float) -> None:
        """Wait up to `within_s` seconds for all tasks, then cancel those that still run."""
        give_up = asyncio.get_running_loop().time() + within_s
        while self._tasks and (left := give_up - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait(self._tasks, timeout=left)
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, Superseded):
            log.debug("%s", error)  # the new owner of the session cleans up
        elif isinstance(error, OutriderError):
            log.warning("%s", error)
        elif error is not None:
            log.error("background work failed", exc_info=error)
