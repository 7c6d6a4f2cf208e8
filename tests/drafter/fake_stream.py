"""A drafter's stream without a connection: a test puts the upstream's frames in, and has what goes out."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import Any

import pytest

from drafter_svc.upstreams import upstream as upstreams
from outrider.v1 import drafter_pb2 as pb


class FakeStream:
    """The one Draft call that an `Upstream` makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[pb.DraftUp] = []
        self._frames: asyncio.Queue[pb.DraftDown] = asyncio.Queue()

        @asynccontextmanager
        async def open_channel(*_: Any) -> Any:
            yield self

        monkeypatch.setattr(upstreams, "open_channel", open_channel)

    def stream_stream(self, *_: Any) -> Any:
        return lambda requests, metadata: self

    async def receive(self, frame: pb.DraftDown) -> None:
        """Have the drafter receive a frame. Returns when that is done, and when all that is queued has gone out."""
        self._frames.put_nowait(frame)
        await self.settle()

    async def settle(self) -> None:
        """Returns when what can go on has done so."""
        for _ in range(20):
            await asyncio.sleep(0)

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> pb.DraftDown:
        return await self._frames.get()

    async def write(self, message: pb.DraftUp) -> None:
        self.sent.append(message)

    def cancel(self) -> None:
        pass
