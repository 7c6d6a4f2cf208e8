"""Whether an event loop takes up work: for probes of liveness, which start a process again that is stuck."""

from __future__ import annotations

import asyncio

from outrider.errors import Unavailable
from outrider.telemetry.pages import PageContent

ANSWER_S = 3.0  # the loop is stuck if it takes up nothing for so long


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
            turn = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
            try:
                turn.result(ANSWER_S)
            except TimeoutError:
                turn.cancel()
                raise Unavailable(f"the event loop has done nothing for {ANSWER_S:g} s") from None
        return PageContent("text/plain", b"alive\n")
