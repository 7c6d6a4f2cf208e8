"""The events that one client is still to be sent: added without waiting, written by one task at the client's pace, and
watched for a client that is behind."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Self, TypeAlias

from outrider.core.answers.answer_reader import ModelForm
from outrider.core.session.contract import FinishReason
from outrider.errors import InternalError, OutriderError, Unavailable
from router.counters.usage_stats import UsageStats
from router.sessions.response import ResponsePart

SLOW_CLIENT_S = 10.0  # a client that does not read for this time loses its slot, and gets one again when it reads
FLUSH_S = 0.2  # how long a client has to read the rest when its call ends with an error
CHECK_S = 0.25  # between two checks of a client; one that is behind at a check may lose its slot to others
NOT_READ = "the client did not read for a while and lost its slot; resume the generation"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartedEvent:
    """The generation has been admitted."""

    session_id: str
    generation: int
    model: str
    seed: int
    prompt_tokens: int
    cached_tokens: int
    forked_from: str
    form: ModelForm  # the form in which the answer is written


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """The generation has ended."""

    reason: FinishReason
    prompt_tokens: int
    usage: UsageStats
    stop: str = ""  # the stop string that ended it


Event: TypeAlias = StartedEvent | ResponsePart | FinishedEvent
Write: TypeAlias = Callable[[Event], Awaitable[None]]  # sends an event
WriteNow: TypeAlias = Callable[[Event], bool]  # sends an event if that needs no wait; returns whether it did


@dataclass(slots=True)
class _OutboxEntry:
    """Events that are written one after the other."""

    since: float  # monotonic time at which the events were added
    events: Iterator[Event]


class Outbox:
    """The events of a response between its log and its client.

    `put` never waits, so no task that commits, logs or ends a generation waits for its client. `limit` bounds an
    outbox: the router lets the verifier commit at most a window beyond it. So at most two windows of tokens wait here,
    besides a replay, whose parts are cut when they are sent.

    As a context manager it waits at the end of the body until the client has been sent everything: at most
    SLOW_CLIENT_S for each part, and FLUSH_S if the body failed. Raises Unavailable when the client does not read, and
    whatever `write` raised.
    """

    def __init__(self, window: int) -> None:
        self.end = 0, 0  # position and text offset behind the latest event
        self.on_progress: Callable[[], None] = lambda: None  # called after each part that was sent
        self.on_error: Callable[[OutriderError], None] = lambda error: None  # called when nothing more can be sent
        self._window = window
        self._written = 0  # position behind the last token that gRPC has taken for the client
        self._caught_up = asyncio.Event()
        self._progress = 0.0  # monotonic time of the latest event that was sent
        self._entries: deque[_OutboxEntry] = deque()  # the first one is being written
        self._changed = asyncio.Event()
        self._write_now: WriteNow = lambda event: False
        self._closed = False
        self._error: OutriderError | None = None
        self._cut_short: OutriderError | None = None
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
            raise self._error or self._cut_short or Unavailable(NOT_READ)

    def begin(self, write: Write, position: int, text_offset: int, write_now: WriteNow | None = None) -> None:
        """Start to send to a client that has everything before that position and text offset. `write` raises Cancelled
        when its call has ended. `write_now` is tried first for what is put while nothing waits: no task has to run."""
        self._written, self.end = position, (position, text_offset)
        if write_now is not None:
            self._write_now = write_now
        self._writing = asyncio.create_task(self._deliver(write))

    def cut_short(self, why: OutriderError) -> None:
        """Stop waiting for the client at the end of the body. `why` is raised there if the client has not been sent
        everything."""
        self._cut_short = why

    @property
    def empty(self) -> bool:
        """Whether the client has been sent all events."""
        return not self._entries

    @property
    def unread_s(self) -> float:
        """Seconds for which the client has not taken the next event."""
        return time.monotonic() - max(self._progress, self._entries[0].since) if self._entries else 0.0

    @property
    def stalled(self) -> bool:
        """Whether the client counts as one that does not read."""
        return self.unread_s >= SLOW_CLIENT_S

    @property
    def limit(self) -> int:
        """The position up to which tokens may be acknowledged, at most a window ahead of the client."""
        return min(self.end[0], self._written + self._window)

    @property
    def behind(self) -> bool:
        """Whether the client is more than a window behind the log."""
        return self.limit < self.end[0]

    async def caught_up(self) -> None:
        """Wait until the client is not behind any more."""
        while self.behind:
            self._caught_up.clear()
            await self._caught_up.wait()

    def put(self, event: Event) -> None:
        """Add an event."""
        if isinstance(event, ResponsePart):
            self.end = event.position + len(event.tokens), event.text_offset
        if self.empty and self._write_now(event):
            self._count_written(event)
        else:
            self._queue((event,))

    def replay(self, parts: Iterable[ResponsePart], position: int, text_offset: int) -> None:
        """Add parts that lead to that position and text offset; they are made when they are sent."""
        self.end = position, text_offset
        self._queue(parts)

    def _queue(self, events: Iterable[Event]) -> None:
        self._entries.append(_OutboxEntry(time.monotonic(), iter(events)))
        self._changed.set()

    async def _deliver(self, write: Write) -> None:
        try:
            await self._send_all(write)
        except OutriderError as error:
            self._error = error
        except Exception:
            log.exception("a response cannot be sent")
            self._error = InternalError("an internal error; the server's log has the details")
        if self._error is not None:
            self.on_error(self._error)

    async def _send_all(self, write: Write) -> None:
        while not (self._closed and self.empty):
            if self.empty:
                self._changed.clear()
                await self._changed.wait()
                continue
            entry = self._entries[0]
            for event in entry.events:
                await write(event)
                self._count_written(event)
            self._entries.popleft()

    def _count_written(self, event: Event) -> None:
        self._progress = time.monotonic()
        if isinstance(event, ResponsePart):
            self._written = event.position + len(event.tokens)
            self._caught_up.set()
            self.on_progress()

    async def _flush(self, writing: asyncio.Task[None], *, failed: bool) -> None:
        while not writing.done() and self.unread_s < (FLUSH_S if failed or self._cut_short else SLOW_CLIENT_S):
            await asyncio.wait({writing}, timeout=FLUSH_S)


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
