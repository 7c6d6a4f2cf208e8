"""Lag of an event loop, which is how late it runs what is due, and the stalls that it causes itself.

Lag is wall-clock time: it also grows when the machine is too busy to run the process. A stall is the process's own
fault: one callback that took too long, or another thread that kept the interpreter's lock. So a stall excludes the time
for which the operating system let the loop's thread wait for a core, and the time for which other threads waited, which
may have held the lock then; but it includes what any one thread has computed meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from outrider.telemetry.metrics import histogram, register_metric

BEAT_S = 0.025  # period of the measurement
THREAD_LIST_S = 1.0  # between two listings of the process's threads
LONG_STALL_S = 1.0  # stalls from here on are logged as warnings; peers count a server that is silent for 2.5 s as dead
STALL_S = 0.1  # no event loop of ours may stand still for longer

log = logging.getLogger(__name__)


class LoopLag:
    """Measures the event loop that `run` runs on.

    `record` takes each lag in seconds; `stalled` is called at each stall of more than STALL_S. `stalls` counts these,
    and `longest_s` is the longest stall, however short; all may be read in any thread.
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
        self.ran_s = 0.0  # seconds for which the process's threads have run; 0 where the system does not report it
        self.waited_s = 0.0  # seconds for which they were ready to run, and waited for a core
        self._record = record
        self._stalled = stalled
        self._beat_s = beat_s

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[None] = loop.create_future()
        with _ThreadClock() as clock:
            waiting: asyncio.TimerHandle
            due = 0.0

            def sleep() -> None:
                nonlocal waiting, due
                spent = clock.start()
                self.ran_s += spent.ran_s
                self.waited_s += spent.waited_s
                due = time.monotonic() + self._beat_s
                waiting = loop.call_later(self._beat_s, beat)

            def beat() -> None:  # not a sleeping task, which would be late by the callbacks of three rounds of the loop
                try:
                    self._record_lag(max(0.0, time.monotonic() - due), clock)
                    sleep()
                except Exception as error:
                    failed.set_exception(error)

            sleep()
            try:
                await failed
            finally:
                waiting.cancel()

    def _record_lag(self, lag_s: float, clock: _ThreadClock) -> None:
        self._record(lag_s)
        if lag_s <= min(STALL_S, self.longest_s):  # the stall is no longer than the lag, so it changes nothing
            return
        stood_s = clock.own_share(lag_s)
        self.longest_s = max(self.longest_s, stood_s)
        if stood_s > STALL_S:
            self.stalls += 1
            self._stalled()
            level = logging.WARNING if stood_s > LONG_STALL_S else logging.DEBUG
            log.log(level, "the event loop stood still for %.3f s", stood_s)


class _Spent(NamedTuple):
    """CPU time and waiting time of a thread, in seconds."""

    ran_s: float
    waited_s: float  # for a core

    def since(self, before: _Spent) -> _Spent:
        return _Spent(self.ran_s - before.ran_s, self.waited_s - before.waited_s)


class _ThreadClock:
    """Measures CPU time and waiting time of this process's threads, for the thread that calls it."""

    def __init__(self) -> None:
        self._files: dict[
            str, int
        ] = {}  # by thread; empty: the system does not report how long threads wait for a core
        self._thread_id = str(threading.get_native_id())
        self._listed_at = -THREAD_LIST_S
        self._before: dict[str, _Spent] = {}
        self._ran_s = 0.0

    def __enter__(self) -> _ThreadClock:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            os.close(file)

    def start(self) -> _Spent:
        """Start a measurement for `own_share`. Return what all threads together have spent since the last one."""
        if time.monotonic() >= self._listed_at + THREAD_LIST_S:
            self._list_threads()
        before, now = self._before, self._read()
        self._before, self._ran_s = now, time.thread_time()
        since = [spent.since(before[thread]) for thread, spent in now.items() if thread in before]
        return _Spent(sum(spent.ran_s for spent in since), sum(spent.waited_s for spent in since))

    def own_share(self, lag_s: float) -> float:
        """Return how much of a lag the process caused itself."""
        self._list_threads()  # threads that started since count, too
        ran_s = min(lag_s, time.thread_time() - self._ran_s)
        since = {
            thread: spent.since(self._before.get(thread, _Spent(0.0, 0.0))) for thread, spent in self._read().items()
        }
        own_thread = since.pop(self._thread_id, None)
        if own_thread is None:
            return ran_s
        left_s = lag_s - own_thread.waited_s
        others_waited_s = sum(other.waited_s for other in since.values())
        most_ran_s = max((other.ran_s for other in since.values()), default=0.0)
        return max(ran_s, min(left_s, max(left_s - others_waited_s, most_ran_s)))

    def _read(self) -> dict[str, _Spent]:
        """Return the times of each thread since its start. Threads that have ended are left out."""
        found = {}
        for thread, file in self._files.items():
            with suppress(OSError):
                ran, waited, _ = os.pread(file, 128, 0).split()
                found[thread] = _Spent(int(ran) / 1e9, int(waited) / 1e9)
        return found

    def _list_threads(self) -> None:
        """Update the list of the process's threads."""
        self._listed_at = time.monotonic()
        with suppress(OSError):
            present = set(os.listdir("/proc/self/task"))
            for ended in self._files.keys() - present:
                os.close(self._files.pop(ended))
            for thread in present - self._files.keys():
                with suppress(OSError):  # it has ended meanwhile, or the system does not report it
                    self._files[thread] = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)


def loop_lag() -> LoopLag:
    """Return the lag of a server's event loop, exported under the catalogue's names. Its `run` must run on the loop."""
    lag = LoopLag(histogram("outrider.loop.lag").record)
    register_metric("outrider.loop.stalls", lambda: lag.stalls)
    register_metric("outrider.process.ran", lambda: lag.ran_s)
    register_metric("outrider.process.waited", lambda: lag.waited_s)
    return lag
