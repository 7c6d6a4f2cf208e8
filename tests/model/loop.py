"""An event loop that a test turns by hand: nothing happens in it but what is ready, and time stands still."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

set_running_loop = asyncio._set_running_loop  # public for loops that are not asyncio's own


class Clock:
    """The time of all parts of a model, and what they name things."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self._names = 0

    def name(self) -> str:
        """A name that is new."""
        self._names += 1
        return f"{self._names:04d}"


class HandLoop(asyncio.AbstractEventLoop):
    """Runs tasks until all of them wait for something that is not theirs to do. `failed` receives what a task raised
    and no other task awaited."""

    def __init__(self, clock: Clock, failed: Callable[[dict[str, Any]], None]) -> None:
        self.clock = clock
        self.tasks: set[asyncio.Task[Any]] = set()
        self._failed = failed
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._count = 0

    def settle(self) -> None:
        """Runs what is ready, and what became due, until nothing is."""
        set_running_loop(self)
        try:
            while True:
                while self._timers and self._timers[0][0] <= self.clock.now:
                    self._ready.append(heapq.heappop(self._timers)[2])
                if not self._ready:
                    return
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            set_running_loop(None)

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A new task, from outside."""
        return self.create_task(work)

    def kill(self) -> None:
        """Ends all tasks, however often they start new ones on their way out."""
        self._timers.clear()
        while self.tasks:
            for task in list(self.tasks):
                task.cancel()
            self.settle()

    @property
    def next_timer(self) -> float | None:
        """When something happens by itself."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    # What tasks, futures and `asyncio` itself ask of a loop.

    def time(self) -> float:
        return self.clock.now

    def get_debug(self) -> bool:
        return False

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.clock.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, handle))
        return handle

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self._failed(context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass
