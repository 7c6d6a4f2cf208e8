"""Turns at work that would hold others up, such as rendering a chat template: fair between tenants, by seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import ParamSpec, TypeVar

from outrider.errors import Overloaded
from router.scheduling.fair_queue import AdmissionTicket, FairQueue, QueueClass

MAX_WAITING = 64  # of one tenant
RETRY_S = 1.0

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


class _Turns:
    """Places that tenants take in turns; the next is that of the waiting tenant that took the fewest seconds."""

    def __init__(self, places: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._free = places
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()

    async def _take(self, tenant: str) -> None:
        if self._free:
            self._free -= 1
            return
        ticket = AdmissionTicket("", tenant, QueueClass.INTERACTIVE, 0.0)
        granted = asyncio.get_running_loop().create_future()
        self._queue.push(ticket, granted)
        try:
            await asyncio.shield(granted)
        except BaseException:
            if granted.done():  # granted in the very moment of the cancellation
                self._pass_on()
            else:
                self._queue.remove(ticket, granted)
            raise

    def _end(self, tenant: str, seconds: float) -> None:
        self._queue.charge(tenant, seconds)
        self._pass_on()

    def _pass_on(self) -> None:
        """Give a place that is free again to the next that waits."""
        granted = self._queue.pop(lambda ticket: True)
        if granted is None:
            self._free += 1
        else:
            granted.set_result(None)


class FairTurns(_Turns):
    """Runs work in threads, `places` at a time, in turns that are fair between tenants."""

    def __init__(self, places: int, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`what`: the work, for messages."""
        super().__init__(places, clock)
        self._what = what

    async def run(
        self, executor: Executor | None, tenant: str, work: Callable[P, ResultT], *args: P.args, **options: P.kwargs
    ) -> ResultT:
        """Return the result of `work`, which runs in `executor` (None: asyncio's own) when it is this tenant's turn.

        Work that has begun keeps its place until it has ended, also when its caller is cancelled. Raises Overloaded
        when too much of the tenant's work waits.
        """
        if not self._free and self._queue.waiting(QueueClass.INTERACTIVE, tenant) >= MAX_WAITING:
            raise Overloaded(
                f"{MAX_WAITING} of your requests wait for {self._what}; retry in {RETRY_S:.0f} s", retry_after=RETRY_S
            )
        await self._take(tenant)
        began = self._clock()
        try:
            running = asyncio.get_running_loop().run_in_executor(executor, lambda: work(*args, **options))
        except BaseException:  # the executor was shut down
            self._pass_on()
            raise
        running.add_done_callback(lambda _: self._end(tenant, self._clock() - began))
        return await asyncio.shield(running)


class LoopTurns(_Turns):
    """Runs work of a millisecond or less in the event loop, one piece each time round, in turns that are fair between
    tenants: whatever else the loop has to do comes between two pieces.

    A caller awaits each of its pieces before the next one, so no more of them wait than there are callers.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(1, clock)

    async def run(self, tenant: str, work: Callable[P, ResultT], *args: P.args, **options: P.kwargs) -> ResultT:
        """Return the result of `work`, which runs when it is this tenant's turn."""
        await self._take(tenant)
        began = self._clock()
        try:
            return work(*args, **options)
        finally:
            asyncio.get_running_loop().call_soon(self._end, tenant, self._clock() - began)
