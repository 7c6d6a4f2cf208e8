"""The frames that are queued for one upstream: written in order, deltas that are queued together in one message."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from outrider.errors import Overloaded
from outrider.rpc import liveness
from outrider.wire import drafter as wire
from outrider.wire.message_bounds import MAX_TOGETHER

OUTGOING_FRAMES = 4096  # most frames that may be queued; an upstream that reads needs a handful
BATCH_BYTES = 2**20  # of deltas in one message, from which on the rest waits for the next
LINGER_S = 0.002  # longest wait of a delta for those of the next levels, where these take less: a message costs as much


class OutgoingFrames:
    """The sending side of a Draft stream. What is queued while no stream is open is dropped.

    `level_s` returns the seconds until the next delta of a session that is not exhausted, 0 if not known; `heartbeat`
    makes the frame that is sent when nothing else is queued.
    """

    def __init__(self, level_s: Callable[[], float], heartbeat: Callable[[], wire.Heartbeat]) -> None:
        self.open = False  # whether a stream takes frames
        self.batches = False  # whether the upstream takes several deltas in one message
        self._level_s = level_s
        self._heartbeat = heartbeat
        self._frames: deque[wire.DraftUp | wire.TreeDelta] = deque()
        self._queued = asyncio.Event()  # set when a frame is queued
        self._urgent = asyncio.Event()  # set when one is queued that does not wait for others
        self._overrun = asyncio.Event()  # set when more frames were to be sent than may be queued

    def __len__(self) -> int:
        return len(self._frames)

    def begin(self, hello: wire.Hello) -> None:
        """Start with the first frame of a new stream."""
        self._frames.clear()
        self._overrun.clear()
        self.open, self.batches = True, False
        self.put(wire.DraftUp(hello=hello))

    def put(self, frame: wire.DraftUp | wire.TreeDelta) -> None:
        """Queue a frame."""
        if not self.open:
            return
        if len(self._frames) < OUTGOING_FRAMES:
            self._frames.append(frame)
            self._queued.set()
            if not self._followed(frame):
                self._urgent.set()
        else:
            self.open = False  # no frame may be left out, so the stream must restart
            self._overrun.set()

    async def overrun(self) -> None:
        """Wait until the upstream reads too slowly. Raises Overloaded then."""
        await self._overrun.wait()
        raise Overloaded(f"does not read what it is sent; more than {OUTGOING_FRAMES} frames wait")

    async def next(self) -> wire.DraftUp:
        """Return the next message: a frame, deltas that are queued one after the other, or a heartbeat when nothing is
        queued in time."""
        if not self._frames:
            self._queued.clear()
            self._urgent.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(liveness.HEARTBEAT_S):
                    await self._queued.wait()
            if self._frames and not self._urgent.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_S):
                        await self._urgent.wait()
        deltas: list[wire.TreeDelta] = []
        size = 0
        limit = MAX_TOGETHER if self.batches else 1
        while self._frames and size <= BATCH_BYTES and len(deltas) < limit:
            frame = self._frames[0]
            if isinstance(frame, wire.TreeDelta):
                deltas.append(frame)
                size += frame.ByteSize()
                self._frames.popleft()
            elif deltas:
                break
            else:
                self._frames.popleft()
                return frame
        if len(deltas) > 1:
            return wire.DraftUp(deltas=deltas)
        if deltas:
            return wire.DraftUp(delta=deltas[0])
        return wire.DraftUp(heartbeat=self._heartbeat())

    def _followed(self, frame: wire.DraftUp | wire.TreeDelta) -> bool:
        """Return whether another delta will be there at once, for the same message."""
        more = self.batches and isinstance(frame, wire.TreeDelta) and not frame.exhausted
        return more and 0.0 < self._level_s() < LINGER_S
