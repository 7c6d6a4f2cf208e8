"""Work that outlives the call it was for, and does not outlive the router."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from outrider.errors import OutriderError, Superseded

log = logging.getLogger(__name__)


class Background:
    """Tasks that nobody waits for, until `drain`. What they raise is logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts the work. The task may be cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def drain(self, within_s: float) -> None:
        """Waits until nothing is left, and cancels what is after `within_s` seconds."""
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
            log.debug("%s", error)  # whoever owns the session now cleans up after it
        elif isinstance(error, OutriderError):
            log.warning("%s", error)
        elif error is not None:
            log.error("background work failed", exc_info=error)
