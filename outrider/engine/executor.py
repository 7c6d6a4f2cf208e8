"""Runs the passes of an engine, one at a time; queued KV changes run before the next pass.

Passes run in a thread of their own, so that the event loop goes on, and short ones in the loop's: handing one over
costs more than the loop loses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.core.sampling.noise import Draw
from outrider.core.stats import Ema
from outrider.engine.following import FollowingPass
from outrider.engine.growth import GrownLevel, Growth
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Engine
from outrider.engine.interface.logits import Logits
from outrider.engine.kv.kv_slots import AcquiredSlot

T = TypeVar("T")

INLINE_S = 0.0005  # a pass that usually is shorter runs in the calling thread
EMA_WEIGHT = 0.1  # weight of the latest pass in the average time of those with about as many rows


class Executor:
    """Runs an engine for one event loop. No other thread may use the engine meanwhile."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._queued: list[Callable[[], None]] = []  # changes, mostly of KV, to run in order before the next pass
        self._thread = ThreadPoolExecutor(1, "forward")
        self._copies = False  # whether KV is copied before the next pass, which may take long
        self._seconds: dict[int, Ema] = {}  # of a pass, by the bits of its number of rows

    def prepare_slot(self, acquired: AcquiredSlot) -> None:
        """Queue the release of what a slot held beyond its cached rows, and the copy of those from another slot."""
        self.release(acquired.slot, acquired.cached if acquired.source is None else 0)
        if acquired.source is not None:
            self._queued.append(partial(self.engine.copy, acquired.source, acquired.slot, acquired.cached))
            self._copies = True

    def release(self, slot: int, rows: int) -> None:
        """Queue the release of a slot's KV rows from `rows` on."""
        self._queued.append(partial(self.engine.release, slot, rows))

    def move(self, slot: int, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Queue the move of rows of a slot's KV."""
        self._queued.append(partial(self.engine.move, slot, source, target))

    def enqueue(self, change: Callable[[], None]) -> None:
        """Queue a change, which runs before the next pass or call, in the order of the queue."""
        self._queued.append(change)

    def run_queued(self) -> None:
        """Run all queued changes at once. No pass may be running."""
        changes, self._queued = self._queued, []
        for change in changes:
            change()

    async def flush(self) -> None:
        """Run all queued changes in the thread of the passes. Nothing is queued when this returns."""
        while self._queued:
            await self.call(lambda: None)

    async def call(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which runs in the thread of the passes, after the queued changes."""
        changes, self._queued = self._queued, []

        def changes_and_work() -> T:
            for change in changes:
                change()
            return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, changes_and_work)

    def replace_engine(self, engine: Engine) -> None:
        """Use another engine from the next pass on. Close the old one, whose KV and queued changes are dropped."""
        self.engine.close()
        self.engine = engine
        self._queued.clear()

    async def sample(
        self,
        segments: Sequence[Segment],
        draws: Sequence[Draw | None],
        meanwhile: Callable[[], None],
        best: int = 0,
        then: Callable[[Logits], None] | None = None,
    ) -> Logits:
        """Run one packed pass, see `Engine.sample`; the calling thread calls `meanwhile` while the pass runs, or before
        a short one, which it runs itself. `then` is called with the logits in the thread of the passes, which
        also runs a short pass then."""

        def sample_and_then() -> Logits:
            logits = self.engine.sample(segments, draws, best)
            if then is not None:
                then(logits)
            return logits

        return await self._run(segments, sample_and_then, meanwhile, inline=then is None)

    async def run_on(
        self,
        segments: Sequence[Segment],
        draws: Sequence[Draw | None],
        following: FollowingPass,
        meanwhile: Callable[[], None],
    ) -> tuple[Logits, frozenset[int]]:
        """Run one packed pass, and begin the one that follows, see `Engine.run_on`; `meanwhile` as for `sample`."""
        return await self._run(segments, lambda: self.engine.run_on(segments, draws, following), meanwhile)

    async def grow(
        self,
        segments: Sequence[Segment],
        draws: Sequence[Draw | None],
        growths: Sequence[Growth | None],
        levels: int,
        meanwhile: Callable[[], None],
    ) -> tuple[Logits, list[GrownLevel]]:
        """Run one packed pass and further levels of trees, see `Engine.grow`; `meanwhile` as for `sample`."""
        return await self._run(segments, lambda: self.engine.grow(segments, draws, growths, levels), meanwhile)

    async def _run(
        self, segments: Sequence[Segment], work: Callable[[], T], meanwhile: Callable[[], None], *, inline: bool = True
    ) -> T:
        changes, self._queued = self._queued, []
        copies, self._copies = self._copies, False
        size = sum(len(it.tokens) for it in segments).bit_length()
        seconds = self._seconds.get(size)
        if seconds is None:
            seconds = self._seconds[size] = Ema(EMA_WEIGHT, mean=INLINE_S)
        if inline and seconds.mean < INLINE_S and not copies:
            meanwhile()
            result = self._pass(seconds, changes, work)
            await asyncio.sleep(0)  # lets changes in that have arrived meanwhile
            return result
        running = asyncio.get_running_loop().run_in_executor(self._thread, self._pass, seconds, changes, work)
        meanwhile()
        return await running

    async def wait_idle(self, changed: asyncio.Event) -> None:
        """Wait for the event; meanwhile an engine of several ranks exchanges heartbeats with them. Raises RankLost."""
        while not changed.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(self.engine.heartbeat_s):
                    await changed.wait()
                    return
            await asyncio.get_running_loop().run_in_executor(self._thread, self.engine.heartbeat)

    def close(self) -> None:
        """Wait until the running pass ends, then close the engine. No pass may follow."""
        self._thread.shutdown(wait=True)
        self.engine.close()

    def _pass(self, seconds: Ema, changes: Sequence[Callable[[], None]], work: Callable[[], T]) -> T:
        for change in changes:
            change()
        began = time.perf_counter()
        result = work()
        seconds.observe(time.perf_counter() - began)
        return result
