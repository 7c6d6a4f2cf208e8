"""Fails a test in which an event loop stood still: a loop of the test's own process, or that of a server process."""

from __future__ import annotations

import asyncio
import gc
import re
import signal
import traceback
import urllib.request
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from types import FrameType

import pytest

from outrider.telemetry.lag import STALL_S, LoopLag

BEAT_S = 0.005  # finer than a server's
FRAMES = 8  # of a place, the innermost ones
STALLS = re.compile(r"^outrider_loop_stalls_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@asynccontextmanager
async def no_stall(limit_s: float = STALL_S) -> AsyncIterator[LoopLag]:
    """Fails where the running loop stands still for more than `limit_s` while the body runs. The time in which the
    machine ran something else is not counted. The loop must be that of the main thread.

    What there is before is kept from the garbage collector, as a server does: a test's process holds far more.
    """
    gc.collect()
    gc.freeze()
    with _Places(limit_s / 2) as places:
        lag = LoopLag(places.beat, beat_s=BEAT_S)
        measuring = asyncio.create_task(lag.run())
        try:
            await asyncio.sleep(2 * BEAT_S)
            yield lag
            await asyncio.sleep(2 * BEAT_S)  # the end of the body counts, too
        finally:
            measuring.cancel()
            await asyncio.gather(measuring, return_exceptions=True)
            gc.unfreeze()
    if lag.longest_s > limit_s:
        pytest.fail(
            f"the event loop stood still for {lag.longest_s:.3f} s, at most {limit_s} s are allowed; it was in:\n"
            + places.of_longest
        )


class _Places:
    """Where the main thread is when the process has computed for `after_s` without a beat.

    A timer of processor time and a signal: a thread that looked would itself hold up a loop on a busy machine. Systems
    look at such timers only when their clock ticks, so on a busy machine a place may stay unknown.
    """

    def __init__(self, after_s: float) -> None:
        self.of_longest = "unknown: not in Python"
        self._after_s = after_s
        self._longest_s = 0.0
        self._latest = ""

    def __enter__(self) -> _Places:
        self._before = signal.signal(signal.SIGPROF, self._note)
        signal.setitimer(signal.ITIMER_PROF, self._after_s)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, self._before)

    def beat(self, lag_s: float) -> None:
        """The loop has run its timer, `lag_s` too late."""
        signal.setitimer(signal.ITIMER_PROF, self._after_s)
        if lag_s > self._longest_s and self._latest:
            self._longest_s, self.of_longest = lag_s, self._latest
        self._latest = ""

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._latest = "".join(traceback.format_stack(frame, limit=FRAMES))


async def stalls(pages: Iterable[str]) -> dict[str, float]:
    """How often the event loops of server processes have stood still since they started, by the address of their page
    for Prometheus (http://HOST:PORT/metrics)."""
    return {page: await asyncio.to_thread(_stalls, page) for page in pages}


def _stalls(page: str) -> float:
    with urllib.request.urlopen(page, timeout=10) as answer:
        found = STALLS.search(answer.read().decode())
    assert found is not None, f"{page} has no outrider_loop_stalls_total"
    return float(found[1])
