"""What arrives over a call, until a test asks for it; and what is sent on one, with heartbeats in between."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple

import grpc
import grpc.aio

WITHIN_S = 20.0  # the longest that anything here takes

_names = itertools.count(1)


def new_name(what: str = "session") -> str:
    """One that no test has used."""
    return f"{what}-{next(_names)}"


class End(NamedTuple):
    """How a call ended."""

    code: grpc.StatusCode
    details: str
    metadata: dict[str, str]


def end_of(error: grpc.aio.AioRpcError) -> End:
    """An error's status, and its trailers."""
    trailers = error.trailing_metadata() or ()
    return End(error.code(), error.details() or "", {key: str(value) for key, value in trailers})


class Inbox:
    """What came, in order, until a test takes it by its kind; and how the call ended."""

    def __init__(self, oneof: str = "") -> None:
        self.frames: list[tuple[str, Any]] = []  # kind and message
        self.last = 0.0  # when the last of all came, by the event loop's clock
        self._oneof = oneof
        self._end: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self._more = asyncio.Event()

    async def fill(self, call: Any) -> None:
        """Reads a call to its end."""
        try:
            async for frame in call:
                self.put(frame)
            self.close(End(grpc.StatusCode.OK, "", {}))
        except grpc.aio.AioRpcError as error:
            self.close(end_of(error))

    def put(self, frame: Any) -> None:
        kind = frame.WhichOneof(self._oneof) or ""
        several = [*getattr(frame, "commits", ()), *getattr(frame, "deltas", ())]
        for message in several:
            self.add("commit" if frame.commits else "delta", message)
        if not several:
            self.add(kind, getattr(frame, kind, None))

    def add(self, kind: str, message: Any) -> None:
        self.frames.append((kind, message))
        self.last = asyncio.get_running_loop().time()
        self._more.set()

    def close(self, end: End) -> None:
        self.last = asyncio.get_running_loop().time()
        if not self._end.done():
            self._end.set_result(end)
        self._more.set()

    def of(self, kind: str, attachment: int | None = None) -> list[Any]:
        """All frames of a kind that were not taken."""
        return [
            message
            for name, message in self.frames
            if name == kind and (attachment is None or message.attachment == attachment)
        ]

    async def take(self, kind: str, attachment: int | None = None, within_s: float = WITHIN_S) -> Any:
        """The next frame of a kind. Frames of other kinds stay."""
        await self.until(lambda: bool(self.of(kind, attachment)), within_s)
        message = self.of(kind, attachment)[0]
        self.frames = [frame for frame in self.frames if frame[1] is not message]
        return message

    async def until(self, condition: Callable[[], bool], within_s: float = WITHIN_S) -> None:
        """Waits until what came makes it true. Fails when the call ends first."""
        async with asyncio.timeout(within_s):
            while not condition():
                assert not self._end.done(), self._end.result()
                self._more.clear()
                await self._more.wait()

    async def end(self, within_s: float = WITHIN_S) -> End:
        """How the call ended, once it has."""
        async with asyncio.timeout(within_s):
            return await asyncio.shield(self._end)

    @property
    def open(self) -> bool:
        return not self._end.done()


async def with_heartbeats(
    outgoing: asyncio.Queue[Any], heartbeat: Any, every_s: float, beats: Callable[[], bool]
) -> AsyncGenerator[Any, None]:
    """What is put into a queue, up to a None; heartbeats in between, and none before the first of it."""
    begun = False
    while True:
        try:
            async with asyncio.timeout(every_s):
                frame = await outgoing.get()
        except TimeoutError:
            if begun and beats():
                yield heartbeat
            continue
        begun = True
        if frame is None:
            return
        yield frame
