"""Turns at work that would hold others up, such as rendering a chat template: fair between tenants, by seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from outrider.errors import Overloaded
from outrider.limits.fair_queue import AdmissionTicket, FairQueue, QueueClass

MAX_WAITING = 64  # of one tenant
RETRY_S = 1.0
ROUND_S = 0.002  # of the event loop, each time that it goes round

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


class FairTurns:
    """Runs work in threads, `places` at a time; the next is that of the waiting tenant that took the fewest seconds."""

    def __init__(self, places: int, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`what`: the work, for messages."""
        self._clock = clock
        self._free = places
        self._what = what
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()

    async def run(
        self, executor: Executor | None, tenant: str, work: Callable[P, ResultT], *args: P.args, **options: P.kwargs
    ) -> ResultT:
        """Return the result of `work`, which runs in `executor` (None: asyncio's own) when it is this tenant's turn.

        Work that has begun keeps its place until it has ended, also when its caller is cancelled. Raises Overloaded
        when too much of the tenant's work waits.
        """
        await self._take(AdmissionTicket("", tenant, QueueClass.INTERACTIVE, 0.0))
        began = self._clock()
        try:
            running = asyncio.get_running_loop().run_in_executor(executor, lambda: work(*args, **options))
        except BaseException:  # the executor was shut down
            self._pass_on()
            raise
        running.add_done_callback(lambda _: self._end(tenant, self._clock() - began))
        return await asyncio.shield(running)

    async def _take(self, ticket: AdmissionTicket) -> None:
        if self._free:
            self._free -= 1
            return
        if self._queue.waiting(ticket.priority, ticket.tenant) >= MAX_WAITING:
            raise Overloaded(
                f"{MAX_WAITING} of your requests wait for {self._what}; retry in {RETRY_S:.0f} s", retry_after=RETRY_S
            )
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


class LoopTurns:
    """Runs pieces of work of less than a millisecond in the event loop: for ROUND_S, then whatever else the loop has to
    do, and so on; the next piece is that of the waiting tenant that took the fewest seconds.

    A caller awaits each of its pieces before the next one, so at most one of them waits for each caller.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._queue: FairQueue[tuple[str, Callable[[], Any], asyncio.Future[Any]]] = FairQueue()
        self._going_round = False  # the loop calls `_go_round` next

    async def run(self, tenant: str, work: Callable[P, ResultT], *args: P.args, **options: P.kwargs) -> ResultT:
        """Return the result of `work`, which runs when it is this tenant's turn."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[ResultT] = loop.create_future()
        ticket = AdmissionTicket("", tenant, QueueClass.INTERACTIVE, 0.0)
        self._queue.push(ticket, (tenant, partial(work, *args, **options), result))
        if not self._going_round:
            self._going_round = True
            loop.call_soon(self._go_round)
        return await result

    def _go_round(self) -> None:
        self._going_round = False
        began = now = self._clock()
        while now - began < ROUND_S and (piece := self._queue.pop(lambda ticket: True)) is not None:
            tenant, work, result = piece
            if result.cancelled():  # its caller has gone
                continue
            try:
                result.set_result(work())
            except Exception as error:
                result.set_exception(error)
            before, now = now, self._clock()
            self._queue.charge(tenant, now - before)
        if len(self._queue):
            self._going_round = True
            asyncio.get_running_loop().call_soon(self._go_round)
