"""Watches a client that is behind: one that does not read at all, and one that holds a slot that others wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.sessions.outbox import Outbox

CHECK_S = 0.25  # between two checks of a client; one that is behind at a check may lose its slot to others


class ClientWatch:
    """Checks a client from time to time until it has been sent everything.

    `on_unread` is called once the client does not read at all, and `on_behind` at each check at which it is behind.
    """

    def __init__(self, outbox: Outbox, *, on_unread: Callable[[], None], on_behind: Callable[[], None]) -> None:
        self._outbox = outbox
        self._on_unread = on_unread
        self._on_behind = on_behind
        self._next: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Check the client in a moment, and again until it has been sent everything."""
        if self._next is None:
            self._next = asyncio.get_running_loop().call_later(CHECK_S, self._check)

    def stop(self) -> None:
        """End the checks."""
        if self._next is not None:
            self._next.cancel()

    def _check(self) -> None:
        self._next = None
        if self._outbox.empty:
            return
        if self._outbox.stalled:
            self._on_unread()
            return
        if self._outbox.behind and self._outbox.unread_s >= CHECK_S:
            self._on_behind()
        self.start()
