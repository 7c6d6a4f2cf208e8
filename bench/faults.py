"""A TCP proxy that makes a network bad: delay, jitter, a rate, cuts, half-open connections. For tests and benchmarks.

async with FaultProxy("127.0.0.1:7070", delay_s=0.02) as proxy:
    client = outrider.AsyncClient(proxy.address)
    proxy.cut()
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

CHUNK = 64 * 1024
BACKLOG = 64  # chunks under way in one direction, before the sender is held back


class FaultProxy:
    """Forwards connections to `target` ("host:port"). All settings may be changed while it runs.

    Each direction is delayed by `delay_s`, plus up to `jitter_s` drawn from `seed`, and keeps its order; with
    `bytes_per_s` it is no faster than that. `sent` and `received` count the bytes that passed towards the target and
    back.
    """

    def __init__(
        self,
        target: str,
        *,
        delay_s: float = 0.0,
        jitter_s: float = 0.0,
        bytes_per_s: float | None = None,
        seed: int = 0,
    ) -> None:
        self.delay_s = delay_s
        self.jitter_s = jitter_s
        self.bytes_per_s = bytes_per_s
        self.address = ""
        self.sent = 0
        self.received = 0
        self.connections = 0  # that were ever made
        self._target = target
        self._random = random.Random(seed)
        self._server: asyncio.Server | None = None
        self._links: dict[_Link, asyncio.Task[None]] = {}
        self._refusing = False
        self._flowing = asyncio.Event()
        self._flowing.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        tasks = list(self._links.values())
        self.cut()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()

    def cut(self) -> None:
        """Resets all connections at once, also frozen ones. New ones work."""
        for link in list(self._links):
            link.reset()

    def refuse(self) -> None:
        """Resets new connections as soon as they are made."""
        self._refusing = True

    def accept(self) -> None:
        """Ends `refuse`."""
        self._refusing = False

    def freeze(self) -> None:
        """Nothing passes any more, and nobody is told: half-open."""
        self._flowing.clear()

    def thaw(self) -> None:
        """What was held passes, and all that follows."""
        self._flowing.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        link = _Link(writer)
        task = asyncio.current_task()
        assert task is not None
        self._links[link] = task
        try:
            if self._refusing:
                link.reset()
                return
            host, _, port = self._target.rpartition(":")
            with suppress(OSError):
                there_reader, there_writer = await asyncio.open_connection(host, int(port))
                link.add(there_writer)
                await link.run(
                    self._carry(reader, there_writer, towards=True), self._carry(there_reader, writer, towards=False)
                )
        finally:
            del self._links[link]
            link.reset()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, towards: bool) -> None:
        """One direction: reads at once, writes when it is due. An end of stream passes too."""
        due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(BACKLOG)
        delivering = asyncio.create_task(self._deliver(due, writer, towards=towards))
        loop = asyncio.get_running_loop()
        last = 0.0
        try:
            while True:
                data = await reader.read(CHUNK)
                jitter = self._random.uniform(0.0, self.jitter_s) if self.jitter_s else 0.0
                start = max(last, loop.time() + self.delay_s + jitter)
                last = start + (len(data) / self.bytes_per_s if self.bytes_per_s else 0.0)
                await due.put((last, data))
                if not data:
                    break
            await delivering
        finally:
            delivering.cancel()

    async def _deliver(
        self, due: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, *, towards: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            when, data = await due.get()
            if (wait := when - loop.time()) > 0:
                await asyncio.sleep(wait)
            await self._flowing.wait()
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            if towards:
                self.sent += len(data)
            else:
                self.received += len(data)
            await writer.drain()


class _Link:
    """Both connections of one client."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writers = [writer]
        self._tasks: list[asyncio.Task[None]] = []
        _undelayed(writer)

    def add(self, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        _undelayed(writer)

    async def run(self, *directions: Coroutine[Any, Any, None]) -> None:
        """Until both directions have ended, or one has failed."""
        self._tasks = [asyncio.create_task(direction) for direction in directions]
        try:
            await asyncio.gather(*self._tasks)
        except (OSError, asyncio.CancelledError):
            pass  # a reset, by one end or by us
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def reset(self) -> None:
        """Ends both connections; who is there hears of a reset and not of an orderly end."""
        for writer in self._writers:
            sock = writer.get_extra_info("socket")
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()


def _undelayed(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
