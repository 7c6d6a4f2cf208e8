"""The calls that generate: each brings the events of one generation, by itself or on a stream that several share."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc.aio

from outrider.errors import Cancelled, OutriderError, Unavailable
from outrider.rpc.status import is_from_outrider
from outrider.wire import inference as wire

REPORT_BYTES = 2**15  # taken since the last report; the router sends at most twice as much ahead
REPORT_PAUSE_S = 0.01  # between two reports
IDLE_S = 10.0  # a stream without calls is closed after this time
LATE_S = 10.0  # how long the events of a call may come behind its end
MAX_HELD = 8  # events on a call itself that wait here; gRPC's flow control holds back the rest

Failure = Callable[[grpc.aio.AioRpcError], OutriderError]


class PlainCall:
    """A call that brings its events by itself."""

    def __init__(self, call: Any, failure: Failure) -> None:
        self._call = call
        self._events = aiter(call)
        self._failure = failure

    async def next(self) -> wire.GenerateResponse | None:
        """Return the next event; None when the call has ended behind its last event. Raises OutriderError, and
        CancelledError after `cancel`."""
        try:
            event: wire.GenerateResponse | None = await anext(self._events, None)
        except grpc.aio.AioRpcError as error:
            raise _broken_off(error, self._failure) from None
        return event

    def cancel(self) -> None:
        """Break the call off."""
        self._call.cancel()


class RoutedCall:
    """A call whose events the router may send on an `AnswerStream`."""

    def __init__(self, call: Any, failure: Failure, stream: AnswerStream) -> None:
        """`stream` has given the call's request its route."""
        self._call = PlainCall(call, failure)
        self._stream = stream
        self._handle = stream.add(self)
        self._events: deque[wire.GenerateResponse] = deque()
        self._changed = asyncio.Event()
        self._room = asyncio.Event()  # an event has been taken
        self._on_stream = False  # the events come on the stream
        self._finished = False  # the last event has been taken
        self._ended = False  # the call has ended without an error
        self._error: BaseException | None = None
        self._taken = 0  # bytes of events from the stream
        self._reported = 0
        self._reading = asyncio.create_task(self._read())

    async def next(self) -> wire.GenerateResponse | None:
        """As of `PlainCall`."""
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._ended and (self._finished or not self._stream.running):
                return None
            await self._wait()
        event = self._events.popleft()
        self._room.set()
        if self._on_stream:
            self._take(event)
        return event

    def cancel(self) -> None:
        """As of `PlainCall`."""
        self.fail(asyncio.CancelledError())

    def receive(self, event: wire.GenerateResponse) -> None:
        """Take over an event from the stream."""
        self._on_stream = True
        self._events.append(event)
        self._changed.set()

    def on_stream_ended(self) -> None:
        """Fail if the events came on the stream. If they do not, or have not begun to, the call goes on by itself."""
        if self._on_stream and not self._finished:
            self.fail(Unavailable("the stream of the answers broke off"))
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        """End with an error, behind the events that are here."""
        self._error = self._error or error
        self._changed.set()
        self._room.set()
        self._call.cancel()
        self._stream.remove(self._handle)

    def _take(self, event: wire.GenerateResponse) -> None:
        self._taken += event.ByteSize()
        if event.HasField("finished"):
            self._finished = True
            self._stream.remove(self._handle)
        elif self._taken - self._reported >= REPORT_BYTES:
            self._reported = self._taken
            self._stream.report(self._handle, self._taken)

    async def _read(self) -> None:
        """Read the call itself to its end."""
        try:
            while (event := await self._call.next()) is not None:
                self._events.append(event)
                self._changed.set()
                while len(self._events) >= MAX_HELD and self._error is None:
                    self._room.clear()
                    await self._room.wait()
        except (Exception, asyncio.CancelledError) as error:
            self.fail(error)
            return
        self._ended = True
        self._changed.set()

    async def _wait(self) -> None:
        """Wait for an event or the end. The last events may come on the stream behind the end of the call."""
        self._changed.clear()
        if not self._ended:
            await self._changed.wait()
            return
        try:
            async with asyncio.timeout(LATE_S):
                await self._changed.wait()
        except TimeoutError:
            self.fail(Unavailable("the router ended the call, and its last events did not come"))


GeneratingCall = PlainCall | RoutedCall  # a running Generate or Resume


class AnswerStream:
    """One Answers call: the router sends the events of several calls on it together."""

    def __init__(self, call: Any, on_end: Callable[[AnswerStream, grpc.aio.AioRpcError | None], None]) -> None:
        """`call`: an Answers call without a message. `on_end` is called when it has ended, with its error if it has
        one."""
        self.running = True
        self._name = secrets.token_bytes(16)
        self._call = call
        self._on_end = on_end
        self._calls: dict[int, RoutedCall] = {}  # by handle
        self._latest = 0  # handle
        self._reports: dict[int, int] = {}  # bytes taken, by handle
        self._reported = asyncio.Event()
        self._closing: asyncio.TimerHandle | None = None
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._report())]

    def next_route(self) -> wire.AnswerRoute:
        """Return the route for the next call that is added."""
        return wire.AnswerRoute(stream=self._name, handle=self._latest + 1)

    def add(self, call: RoutedCall) -> int:
        """Add a call. Return its handle."""
        if self._closing is not None:
            self._closing.cancel()
        self._latest += 1
        self._calls[self._latest] = call
        return self._latest

    def remove(self, handle: int) -> None:
        """Forget a call. What still comes for it is dropped."""
        if self._calls.pop(handle, None) is not None and not self._calls and self.running:
            self._closing = asyncio.get_running_loop().call_later(IDLE_S, self.end)

    def report(self, handle: int, taken: int) -> None:
        """Have the router sent how many bytes of a call's events were taken so far."""
        self._reports[handle] = taken
        self._reported.set()

    def end(self, error: grpc.aio.AioRpcError | None = None) -> None:
        """End the stream."""
        if not self.running:
            return
        self.running = False
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        if self._closing is not None:
            self._closing.cancel()
        self._on_end(self, error)
        for call in list(self._calls.values()):
            call.on_stream_ended()

    async def _receive(self) -> None:
        failed = None
        try:
            async for response in self._call:
                if response is None:  # gRPC's value for bytes that do not parse
                    break
                for answer in response.answers:
                    if (call := self._calls.get(answer.handle)) is not None:
                        call.receive(answer.response)
        except grpc.aio.AioRpcError as error:
            failed = error
        finally:
            self.end(failed)

    async def _report(self) -> None:
        try:
            await self._call.write(wire.AnswersRequest(stream=self._name))
            while True:
                await self._reported.wait()
                self._reported.clear()
                reports, self._reports = self._reports, {}
                await self._call.write(wire.AnswersRequest(handles=reports.keys(), taken=reports.values()))
                await asyncio.sleep(REPORT_PAUSE_S)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader finds out how the call has ended


def _broken_off(error: grpc.aio.AioRpcError, failure: Failure) -> OutriderError:
    """Return the error to raise for a call that has failed."""
    known = failure(error)
    if isinstance(known, Cancelled) and not is_from_outrider(error):  # gRPC's status when a router ends
        return Unavailable(f"the router broke the call off: {known}")
    return known
