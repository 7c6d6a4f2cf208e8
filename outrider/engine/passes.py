"""The passes of an engine, one after the other in a thread of their own, each behind the KV copies asked for before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.core.noise import Draw
from outrider.engine.batch import Segment
from outrider.engine.engine import Engine
from outrider.engine.logits import Logits
from outrider.engine.slots import Taken

T = TypeVar("T")


class Passes:
    """Computes for one loop. No other thread uses the engine meanwhile."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._moves: list[Callable[[], None]] = []  # mostly of KV, in order, before the next pass
        self._thread = ThreadPoolExecutor(1, "forward")

    def fill(self, place: Taken) -> None:
        """Copies the KV that a slot begins with from where it is, if it is elsewhere; what else the slot held goes."""
        self.release(place.slot, place.cached if place.source is None else 0)
        if place.source is not None:
            self._moves.append(partial(self._engine.copy, place.source, place.slot, place.cached))

    def release(self, slot: int, rows: int) -> None:
        """Nobody needs the KV of a slot's rows from `rows` on any more."""
        self._moves.append(partial(self._engine.release, slot, rows))

    def move(self, slot: int, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Moves rows of a slot's KV."""
        self._moves.append(partial(self._engine.move, slot, source, target))

    def later(self, change: Callable[[], None]) -> None:
        """Has something done before the next pass or call, in order."""
        self._moves.append(change)

    def settle(self) -> None:
        """Does at once what was asked for before the next pass. None may run."""
        moves, self._moves = self._moves, []
        for move in moves:
            move()

    async def call(self, work: Callable[[], T]) -> T:
        """Does something else between two passes."""
        moves, self._moves = self._moves, []

        def called() -> T:
            for move in moves:
                move()
            return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, called)

    def renew(self, engine: Engine) -> None:
        """Computes with another engine from the next pass on. The KV of the one before goes with it."""
        self._engine.close()
        self._engine = engine
        self._moves.clear()

    async def judge(
        self, segments: Sequence[Segment], draws: Sequence[Draw | None], meanwhile: Callable[[], None], best: int = 0
    ) -> Logits:
        """The packed pass; see Engine.judge. `meanwhile` is done here while it runs."""
        moves, self._moves = self._moves, []
        passing = asyncio.get_running_loop().run_in_executor(self._thread, self._pass, moves, segments, draws, best)
        meanwhile()
        return await passing

    async def rest(self, changed: asyncio.Event) -> None:
        """Waits for that, and keeps an engine of several ranks in touch with them meanwhile. Raises RankLost."""
        while not changed.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._engine.beat_s):
                    await changed.wait()
                    return
            await asyncio.get_running_loop().run_in_executor(self._thread, self._engine.beat)

    def close(self) -> None:
        """Waits for a pass that runs, and closes the engine. There may be no pass after it."""
        self._thread.shutdown(wait=True)
        self._engine.close()

    def _pass(
        self,
        moves: Sequence[Callable[[], None]],
        segments: Sequence[Segment],
        draws: Sequence[Draw | None],
        best: int,
    ) -> Logits:
        for move in moves:
            move()
        return self._engine.judge(segments, draws, best)
