"""Calls for sessions whose generation has yet to run, because they wait for a place: a Cancel ends these, too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from outrider.errors import Cancelled

ResultT = TypeVar("ResultT")


class Beginning:
    """One call, until its generation runs. `cancelled`: it is to end as soon as it does."""

    def __init__(self) -> None:
        self.cancelled = False
        self.over = asyncio.Event()
        self._limit: asyncio.Timeout | None = None  # while it waits

    async def wait_for(self, work: Awaitable[ResultT]) -> ResultT:
        """What comes of the work. Raises Cancelled, and gives the work up, when the call is cancelled meanwhile."""
        try:
            async with asyncio.timeout(None) as self._limit:
                return await work
        except TimeoutError:
            if not self.cancelled:
                raise
            raise Cancelled("the generation was cancelled while it waited for a place") from None
        finally:
            self._limit = None

    def cancel(self) -> None:
        """Ends its waiting now, or its generation once that runs."""
        self.cancelled = True
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time())


class Beginnings:
    """All of a router's. They are found by tenant and session, as far as callers named one."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], list[Beginning]] = {}

    @contextmanager
    def of(self, tenant: str, session_id: str) -> Iterator[Beginning]:
        """One more, until its `over` is set or the body has ended."""
        beginning = Beginning()
        calls = self._calls.setdefault((tenant, session_id), [])
        calls.append(beginning)
        try:
            yield beginning
        finally:
            beginning.over.set()
            calls.remove(beginning)
            if not calls:
                self._calls.pop((tenant, session_id), None)

    async def cancel(self, tenant: str, session_id: str) -> None:
        """Cancels those of a session; returns when none of them is one any more."""
        calls = [*self._calls.get((tenant, session_id), ())] if session_id else []
        for beginning in calls:
            beginning.cancel()
        for beginning in calls:
            await beginning.over.wait()
