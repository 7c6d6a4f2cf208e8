"""How late an event loop runs what is due: its lag, and the stalls that it causes itself.

Lag is wall-clock time: it also grows when the machine is too busy to run the process. A stall is the process's own
fault, one callback that took too long, or another thread that kept the interpreter's lock. So the time for which the
operating system had threads of the process wait for a core is taken off: the loop's, and others, which may have had the
lock then. What the loop's thread itself has computed is a stall in any case.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress

from outrider.telemetry.metrics import histogram, watch

BEAT_S = 0.025  # that the loop is asked to sleep
LIST_S = 1.0  # between two looks at which threads there are
LONG_S = 1.0  # of a stall that is worth a line in the log; peers take a server that is silent for 2.5 s for dead
STALL_S = 0.1  # for longer no event loop of ours may stand still

log = logging.getLogger(__name__)


class LoopLag:
    """Measures the event loop that `run` runs on.

    `record` takes each lag in seconds, `stalled` is called at each stall of more than STALL_S. `stalls` counts these,
    and `longest_s` is the longest stall, however short; both may be read in any thread.
    """

    def __init__(
        self,
        record: Callable[[float], None] = lambda lag_s: None,
        stalled: Callable[[], None] = lambda: None,
        *,
        beat_s: float = BEAT_S,
    ) -> None:
        self.stalls = 0
        self.longest_s = 0.0
        self._record = record
        self._stalled = stalled
        self._beat_s = beat_s

    async def run(self) -> None:
        """Measures until cancelled."""
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[None] = loop.create_future()
        with _ThreadClock() as clock:
            waiting: asyncio.TimerHandle
            due = 0.0

            def sleep() -> None:
                nonlocal waiting, due
                clock.start()
                due = time.monotonic() + self._beat_s
                waiting = loop.call_later(self._beat_s, beat)

            def beat() -> None:  # a task that sleeps would be late by the callbacks of three rounds of the loop
                try:
                    self._take(max(0.0, time.monotonic() - due), clock)
                    sleep()
                except Exception as error:
                    failed.set_exception(error)

            sleep()
            try:
                await failed
            finally:
                waiting.cancel()

    def _take(self, lag_s: float, clock: _ThreadClock) -> None:
        stood_s = clock.own(lag_s)
        self._record(lag_s)
        self.longest_s = max(self.longest_s, stood_s)
        if stood_s > STALL_S:
            self.stalls += 1
            self._stalled()
            level = logging.WARNING if stood_s > LONG_S else logging.DEBUG
            log.log(level, "the event loop stood still for %.3f s", stood_s)


class _ThreadClock:
    """What the threads of this process get of the machine. `own` is asked by the thread that has called `start`."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}  # by thread; none: the system does not tell how long threads wait for a core
        self._listed_at = -LIST_S
        self._waited_s: dict[int, float] = {}
        self._ran_s = 0.0

    def __enter__(self) -> _ThreadClock:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            os.close(file)

    def start(self) -> None:
        """What `own` says is counted from here."""
        if (now := time.monotonic()) >= self._listed_at + LIST_S:
            self._list()
            self._listed_at = now
        self._waited_s, self._ran_s = self._waited(), time.thread_time()

    def own(self, lag_s: float) -> float:
        """How much of a lag the process made itself."""
        ran_s = min(lag_s, time.thread_time() - self._ran_s)
        if not self._files:
            return ran_s
        waited_s = sum(after_s - self._waited_s[file] for file, after_s in self._waited().items())
        return max(ran_s, lag_s - waited_s)

    def _waited(self) -> dict[int, float]:
        """Seconds that each thread has waited for a core, in all. Those that have ended are left out."""
        waited_s = {}
        for file in self._files.values():
            with suppress(OSError):
                waited_s[file] = int(os.pread(file, 128, 0).split()[1]) / 1e9
        return waited_s

    def _list(self) -> None:
        """Looks which threads there are."""
        with suppress(OSError):
            present = set(os.listdir("/proc/self/task"))
            for ended in self._files.keys() - present:
                os.close(self._files.pop(ended))
            for thread in present - self._files.keys():
                with suppress(OSError):  # it has ended meanwhile, or the system does not tell
                    self._files[thread] = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)


def loop_lag(
    record: Callable[[float], None] = lambda lag_s: None, stalled: Callable[[], None] = lambda: None
) -> LoopLag:
    """The lag of a server's event loop, told by the names of the catalogue, and to these, as `LoopLag` does. Its `run`
    has to run on that loop."""
    told = histogram("outrider.loop.lag")

    def both(lag_s: float) -> None:
        told.record(lag_s)
        record(lag_s)

    lag = LoopLag(both, stalled)
    watch("outrider.loop.stalls", lambda: lag.stalls)
    return lag
