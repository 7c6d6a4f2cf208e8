"""What one client is still to be sent: put there without waiting, written by one task, at the client's own pace."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Self, TypeAlias

from outrider.errors import InternalError, OutriderError, Unavailable
from router.answer import Part, Reason
from router.usage import Figures

SLOW_CLIENT_S = 10.0  # a client that does not read for so long loses its place, and gets it back when it reads
FLUSH_S = 0.2  # that a client has to read what waits for it, where its call ends with an error
NOT_READ = "the client did not read for a while and lost its place; resume the generation"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Started:
    """The generation has been placed."""

    session_id: str
    generation: int
    model: str
    seed: int
    prompt_tokens: int
    cached_tokens: int
    forked_from: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The generation has ended."""

    reason: Reason
    prompt_tokens: int
    figures: Figures


Event: TypeAlias = Started | Part | Finished


@dataclass(slots=True)
class _Entry:
    """Events that are written one after the other."""

    since: float  # monotonic; when they were put here
    events: Iterator[Event]


class Outbox:
    """The parts of an answer between its log and its client.

    `put` never waits, so nobody who commits, logs or ends a generation waits for its client. What bounds an outbox is
    `limit`: its generation has the verifier commit no more than a window beyond it, so two windows of tokens at most
    wait here, besides a replay, whose parts are cut when it is their turn.

    As a context manager it waits at the end of the body until the client has been sent everything, at most
    SLOW_CLIENT_S for each part, and FLUSH_S where the body failed. Raises Unavailable when the client does not read,
    and what `write` raised.
    """

    def __init__(self, window: int) -> None:
        self.end = 0, 0  # position and offset of the text behind what was put here last
        self.on_progress: Callable[[], None] = _nothing  # the client was sent an event
        self.on_broken: Callable[[OutriderError], None] = _ignore  # nothing more can be sent
        self._window = window
        self._written = 0  # position behind the last token that gRPC has taken for the client
        self._caught_up = asyncio.Event()
        self._progress = 0.0  # monotonic; when the client was last sent an event
        self._entries: deque[_Entry] = deque()  # the one that is written is the first
        self._changed = asyncio.Event()
        self._closed = False
        self._broken: OutriderError | None = None
        self._hurry: OutriderError | None = None
        self._writing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._closed = True
        self._changed.set()
        if self._writing is None:
            return
        try:
            if not isinstance(error, asyncio.CancelledError):
                await self._flush(self._writing, failed=error is not None)
        finally:
            self._writing.cancel()
        if error is None and not self.empty:
            raise self._broken or self._hurry or Unavailable(NOT_READ)

    def begin(self, write: Callable[[Event], Awaitable[None]], position: int, text_offset: int) -> None:
        """Starts to send to a client that has all before that place. `write` raises Cancelled when its call has
        ended."""
        self._written, self.end = position, (position, text_offset)
        self._writing = asyncio.create_task(self._deliver(write))

    def hurry(self, why: OutriderError) -> None:
        """Has the client no longer waited for at the end. `why` is raised where it has not been sent everything."""
        self._hurry = why

    @property
    def empty(self) -> bool:
        """Whether the client has been sent all that was put here."""
        return not self._entries

    @property
    def waits_s(self) -> float:
        """How long the client has not taken the event that is next."""
        return time.monotonic() - max(self._progress, self._entries[0].since) if self._entries else 0.0

    @property
    def stalled(self) -> bool:
        """Whether the client counts as one that does not read."""
        return self.waits_s >= SLOW_CLIENT_S

    @property
    def limit(self) -> int:
        """The position from which the verifier may go on for a window: that of the log, and at most a window ahead of
        the client."""
        return min(self.end[0], self._written + self._window)

    @property
    def behind(self) -> bool:
        """Whether the client is more than a window behind the log."""
        return self.limit < self.end[0]

    async def caught_up(self) -> None:
        """Returns when the client is not behind any more."""
        while self.behind:
            self._caught_up.clear()
            await self._caught_up.wait()

    def put(self, event: Event) -> None:
        """Queues an event."""
        if isinstance(event, Part):
            self.end = event.position + len(event.tokens), event.text_offset
        self._queue((event,))

    def replay(self, parts: Iterable[Part], position: int, text_offset: int) -> None:
        """Queues parts that lead to that place, and are made when it is their turn."""
        self.end = position, text_offset
        self._queue(parts)

    def _queue(self, events: Iterable[Event]) -> None:
        self._entries.append(_Entry(time.monotonic(), iter(events)))
        self._changed.set()

    async def _deliver(self, write: Callable[[Event], Awaitable[None]]) -> None:
        try:
            await self._send_all(write)
        except OutriderError as error:
            self._broken = error
        except Exception:
            log.exception("an answer cannot be sent")
            self._broken = InternalError("an internal error; the server's log has the details")
        if self._broken is not None:
            self.on_broken(self._broken)

    async def _send_all(self, write: Callable[[Event], Awaitable[None]]) -> None:
        while not (self._closed and self.empty):
            if self.empty:
                self._changed.clear()
                await self._changed.wait()
                continue
            entry = self._entries[0]
            for event in entry.events:
                await write(event)
                self._progress = time.monotonic()
                if isinstance(event, Part):
                    self._written = event.position + len(event.tokens)
                    self._caught_up.set()
                    self.on_progress()
            self._entries.popleft()

    async def _flush(self, writing: asyncio.Task[None], *, failed: bool) -> None:
        while not writing.done() and self.waits_s < (FLUSH_S if failed or self._hurry else SLOW_CLIENT_S):
            await asyncio.wait({writing}, timeout=FLUSH_S)


def _nothing() -> None:
    pass


def _ignore(error: OutriderError) -> None:
    pass
