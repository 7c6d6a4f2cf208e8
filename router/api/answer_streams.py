"""Answer streams: the events of many generations of one client on one call, many events in one message.

A generation keeps its own call, Generate or Resume, for its request, deadline, status and cancellation. Only its events
go another way, at most a window of them ahead of what the client has taken, so that one that is not read holds up no
other. gRPC for Python takes as long for a message of one event as for one of thirty.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc.aio

from outrider.errors import Cancelled, InvalidRequest, Unavailable
from outrider.limits.concurrency_limit import ConcurrencyLimit
from outrider.rpc.authorization import MESSAGE_S
from outrider.wire import inference as wire

WINDOW_BYTES = 2**16  # of a generation's messages that the client has not taken; one message may exceed it
MESSAGE_BYTES = 2**20  # from this many bytes on, further events wait for the next message
NAME_BYTES = 16  # of a stream's name
MAX_STREAMS = 256  # of one tenant
MAX_HANDLES = 1024  # of one message
READ_PAUSE_S = 0.01  # between two messages of a client; what it has to report goes into one
FLUSH_S = 0.2  # time that the events in front of an error have to be written

Context = grpc.aio.ServicerContext[Any, Any]


class AnswerStreams:
    """The answer streams of a router's clients."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, bytes], AnswerQueue] = {}  # by tenant and name
        self._limit = ConcurrencyLimit(
            f"a tenant has at most {MAX_STREAMS} streams of answers; requests work without", 2**30, of_key=MAX_STREAMS
        )

    async def serve(self, tenant: str, requests: AsyncIterator[wire.AnswersRequest], context: Context) -> None:
        """Serve a stream until its client closes its side or breaks it off. Raises InvalidRequest, Overloaded."""
        with self._limit.hold(tenant):
            key = tenant, await _name(requests)
            if key in self._streams:
                raise InvalidRequest("stream", "this name is in use; draw 16 random bytes for each stream")
            stream = self._streams[key] = AnswerQueue()
            try:
                await stream.run(requests, context.write)
            finally:
                del self._streams[key]

    @asynccontextmanager
    async def writer(
        self, tenant: str, route: tuple[bytes, int] | None, context: Context
    ) -> AsyncIterator[AnswerWriter]:
        """Yield what writes the events of a call: to the named stream under a handle, or on the call itself if there is
        no such stream. They are on their way before the call ends."""
        writer = AnswerWriter(context, lambda: self._lane(tenant, route))
        try:
            yield writer
        except Exception:
            if writer.lane is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(FLUSH_S):
                        await writer.lane.flush()
            raise
        finally:
            if writer.lane is not None:
                writer.lane.close()

    def _lane(self, tenant: str, route: tuple[bytes, int] | None) -> _Lane | None:
        if route is None:
            return None
        name, handle = route
        stream = self._streams.get((tenant, name))
        return None if stream is None else stream.open(handle)


class AnswerWriter:
    """Writes one call's events, to its answer stream or else to the call itself."""

    def __init__(self, context: Context, find_lane: Callable[[], _Lane | None]) -> None:
        self._context = context
        self._find_lane = find_lane
        self.lane: _Lane | None = None  # None: events go on the call itself, or none was written yet
        self._begun = False

    async def write(self, message: wire.GenerateResponse) -> None:
        """Write one message; wait until the client has room for it, for the last one until it is on its way.

        The first one decides which way all go. Raises Cancelled when the client has gone, Unavailable when its stream
        has ended.
        """
        if not self._begun:
            self.lane, self._begun = self._find_lane(), True
        if self.lane is not None:
            await self.lane.write(message)
            if message.HasField("finished"):
                await self.lane.flush()
            return
        try:
            await self._context.write(message)
        except (grpc.aio.InternalError, grpc.aio.UsageError):
            # The call ended during the write; that we are cancelled follows in a moment.
            raise Cancelled("the client has gone") from None


class AnswerQueue:
    """One stream: a queue of events, which its only writer empties into one message after the other."""

    def __init__(self) -> None:
        self._lanes: dict[int, _Lane] = {}  # by handle
        self._queue: deque[tuple[_Lane, wire.GenerateResponse, int]] = deque()  # with their bytes
        self._wake = asyncio.Event()

    async def run(
        self, requests: AsyncIterator[wire.AnswersRequest], send: Callable[[wire.AnswersResponse], Awaitable[None]]
    ) -> None:
        """Send events until the client closes its side. Raises InvalidRequest."""
        reading = asyncio.create_task(self._read(requests))
        reading.add_done_callback(lambda _: self._wake.set())
        try:
            while not reading.done():
                await self._wake.wait()
                self._wake.clear()
                while self._queue and not reading.done():
                    message, lanes = self._take()
                    await send(message)
                    for lane in lanes:
                        lane.changed.set()
            reading.result()
        finally:
            for lane in self._lanes.values():
                lane.fail()
            reading.cancel()
            await asyncio.wait({reading})

    def open(self, handle: int) -> _Lane | None:
        """Return the way of a call's events; None if the handle is 0 or in use."""
        if not handle or handle in self._lanes:
            return None
        lane = self._lanes[handle] = _Lane(self, handle)
        return lane

    def close(self, lane: _Lane) -> None:
        """Free a handle; events of it that wait are not sent."""
        del self._lanes[lane.handle]

    def put(self, lane: _Lane, message: wire.GenerateResponse, size: int) -> None:
        """Queue an event of `size` bytes."""
        self._queue.append((lane, message, size))
        self._wake.set()

    def _take(self) -> tuple[wire.AnswersResponse, set[_Lane]]:
        """Return the next message, and whose events are in it."""
        message, lanes, size = wire.AnswersResponse(), set(), 0
        while self._queue and size < MESSAGE_BYTES:
            lane, response, bytes_ = self._queue.popleft()
            lane.take(bytes_)
            size += bytes_
            if not lane.closed:
                message.answers.add(handle=lane.handle, response=response)
                lanes.add(lane)
        return message, lanes

    async def _read(self, requests: AsyncIterator[wire.AnswersRequest]) -> None:
        async for request in requests:
            if len(request.handles) > MAX_HANDLES:
                raise InvalidRequest("handles", f"has {len(request.handles)} entries, must have at most {MAX_HANDLES}")
            if len(request.handles) != len(request.taken):
                raise InvalidRequest("taken", f"has {len(request.taken)} entries for {len(request.handles)} handles")
            for handle, taken in zip(request.handles, request.taken, strict=True):
                if (lane := self._lanes.get(handle)) is not None:
                    lane.acknowledge(taken)
            await asyncio.sleep(READ_PAUSE_S)


class _Lane:
    """The way of one call's events on a stream. Counts the bytes of messages."""

    def __init__(self, stream: AnswerQueue, handle: int) -> None:
        self.handle = handle
        self.changed = asyncio.Event()  # the client has taken, or the stream has written, more of it
        self.closed = False
        self._stream = stream
        self._put = 0  # into the queue
        self._written = 0  # handed to gRPC
        self._taken = 0  # by the client
        self._failed = False

    async def write(self, message: wire.GenerateResponse) -> None:
        """Queue an event once less than a window is not taken. Raises Unavailable."""
        await self._wait(lambda: self.ready)
        self.put(message)

    @property
    def ready(self) -> bool:
        """Whether less than a window is not taken."""
        return self._put - self._taken < WINDOW_BYTES and not self._failed

    def put(self, message: wire.GenerateResponse) -> None:
        """Queue an event."""
        size = message.ByteSize()
        self._put += size
        self._stream.put(self, message, size)

    async def flush(self) -> None:
        """Wait until all events have been handed to gRPC. Raises Unavailable."""
        await self._wait(lambda: self._written == self._put)

    def take(self, size: int) -> None:
        """Count an event of `size` bytes that leaves the queue."""
        self._written += size

    def acknowledge(self, taken: int) -> None:
        """Take over how much the client has taken. Raises InvalidRequest."""
        if taken > self._written:
            raise InvalidRequest("taken", f"is {taken} bytes of handle {self.handle}, only {self._written} were sent")
        self._taken = max(taken, self._taken)
        self.changed.set()

    def fail(self) -> None:
        """End because the stream has ended."""
        self._failed = True
        self.changed.set()

    def close(self) -> None:
        """Free the handle."""
        self.closed = True
        self._stream.close(self)

    async def _wait(self, condition: Callable[[], bool]) -> None:
        while not self._failed and not condition():
            self.changed.clear()
            await self.changed.wait()
        if self._failed:
            raise Unavailable("the stream of this call's answers has ended; resume the generation")


async def _name(requests: AsyncIterator[wire.AnswersRequest]) -> bytes:
    """Return the name that a stream's first message gives it. Raises InvalidRequest."""
    try:
        async with asyncio.timeout(MESSAGE_S):
            name = (await anext(requests)).stream
    except (TimeoutError, StopAsyncIteration):
        raise InvalidRequest("stream", "the first message, which names the stream, is missing") from None
    if len(name) != NAME_BYTES:
        raise InvalidRequest("stream", f"is {len(name)} bytes, must be {NAME_BYTES} random ones")
    return name
