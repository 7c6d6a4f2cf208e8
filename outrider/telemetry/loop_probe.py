"""Questions to an event loop from another thread, for pages: its answer, or that it is stuck."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from outrider.errors import Unavailable
from outrider.telemetry.pages import PageContent

ANSWER_S = 3.0  # the event loop counts as stuck if a callback has not run for this long

ResultT = TypeVar("ResultT")


def answer_of(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, ResultT], within_s: float) -> ResultT:
    """Return what the work returns on the loop. Called in another thread. Raises Unavailable if it takes too long."""
    answer = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return answer.result(within_s)
    except TimeoutError:
        answer.cancel()
        raise Unavailable(f"the event loop has done nothing for {within_s:g} s") from None


class LoopProbe:
    """A page that answers 200 while an event loop works, and 503 while it is stuck."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def watch(self) -> None:
        """Watch the running loop from now on. Until then the page answers 200: the process starts."""
        self._loop = asyncio.get_running_loop()

    def page(self) -> PageContent:
        """Return the page. Called in a thread other than the loop's. Raises Unavailable if the loop is stuck."""
        if self._loop is not None:
            answer_of(self._loop, asyncio.sleep(0), ANSWER_S)
        return PageContent("text/plain", b"alive\n")
