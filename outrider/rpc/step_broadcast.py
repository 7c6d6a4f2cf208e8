"""Streams a session's steps to any number of watchers, none of which holds up the others or what sends the steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from outrider.errors import OutriderError
from outrider.wire import types as wire

MAX_QUEUED = 64  # steps that are queued for a slow watcher


class StepBroadcast:
    """The watchers of one session. One that does not keep up misses steps, and its next step has their number."""

    def __init__(self) -> None:
        self.closed = False
        self._error: OutriderError | None = None
        self._watchers: set[_Watcher] = set()

    @property
    def watched(self) -> bool:
        """Whether there are watchers."""
        return bool(self._watchers)

    async def steps(self) -> AsyncGenerator[wire.StepTree, None]:
        """Yield the steps from now on, until `close`. Raises the error of `close`."""
        watcher = _Watcher()
        self._watchers.add(watcher)
        try:
            while not (self.closed and watcher.queue.empty()):
                if (step := await watcher.queue.get()) is not None:
                    yield step
            if self._error is not None:
                raise self._error
        finally:
            self._watchers.discard(watcher)

    def show(self, step: wire.StepTree) -> None:
        """Queue a step for each watcher. It must not change afterwards."""
        for watcher in self._watchers:
            watcher.add(step)

    def close(self, error: OutriderError | None = None) -> None:
        """End all streams, after the steps that are queued, and with an error if there is one. Close once."""
        if self.closed:
            return
        self.closed, self._error = True, error
        for watcher in self._watchers:
            watcher.queue.put_nowait(None)


class _Watcher:
    """One watcher's steps."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[wire.StepTree | None] = asyncio.Queue()  # bounded by `add`; None: the end
        self._missed = 0

    def add(self, step: wire.StepTree) -> None:
        """Queue a step, or count it as missed where the watcher does not keep up."""
        missed = self._missed + step.missed
        if self.queue.qsize() >= MAX_QUEUED:
            self._missed = missed + 1
            return
        if missed != step.missed:
            own = wire.StepTree()
            own.CopyFrom(step)
            own.missed, step = missed, own
        self._missed = 0
        self.queue.put_nowait(step)
