"""Generate calls that wait for admission and whose generation does not run yet. Cancel ends these, too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from outrider.errors import Cancelled

ResultT = TypeVar("ResultT")


class PendingRequest:
    """One call until its generation runs. `cancelled`: the generation is to end as soon as it runs. `settled` is set
    when the generation runs or the call has ended."""

    def __init__(self) -> None:
        self.cancelled = False
        self.settled = asyncio.Event()
        self._limit: asyncio.Timeout | None = None  # while the call waits

    async def wait_for(self, work: Awaitable[ResultT]) -> ResultT:
        """Return the result of `work`. Raises Cancelled, and gives `work` up, when the call is cancelled meanwhile."""
        try:
            async with asyncio.timeout(None) as self._limit:
                return await work
        except TimeoutError:
            if not self.cancelled:
                raise
            raise Cancelled("the generation was cancelled while it waited for a slot") from None
        finally:
            self._limit = None

    def cancel(self) -> None:
        """End the wait now, or the generation once it runs."""
        self.cancelled = True
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time())


class PendingRequests:
    """All pending requests of a router, by tenant and session; "" stands for a request without a session."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], list[PendingRequest]] = {}

    @contextmanager
    def register(self, tenant: str, session_id: str) -> Iterator[PendingRequest]:
        """Register one more request until it is settled or the body has ended."""
        pending = PendingRequest()
        calls = self._calls.setdefault((tenant, session_id), [])
        calls.append(pending)
        try:
            yield pending
        finally:
            pending.settled.set()
            calls.remove(pending)
            if not calls:
                self._calls.pop((tenant, session_id), None)

    async def cancel(self, tenant: str, session_id: str) -> None:
        """Cancel the pending requests of a session; return when all of them are settled."""
        calls = [*self._calls.get((tenant, session_id), ())] if session_id else []
        for pending in calls:
            pending.cancel()
        for pending in calls:
            await pending.settled.wait()
