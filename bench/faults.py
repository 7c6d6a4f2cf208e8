"""A TCP proxy that injects faults: it delays a link, limits its bandwidth, freezes it or breaks it.

async with FaultProxy("127.0.0.1:7070", delay_s=0.02, jitter_s=0.005) as proxy:
    client = outrider.AsyncClient(proxy.address)
    ...
    proxy.freeze()  # the peer is gone, and no packet reports it
    proxy.cut()  # every connection is reset
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, Self

Direction = Literal["up", "down"]  # from the client to the target; from the target to the client
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

CHUNK = 2**16  # bytes read at a time
HELD = 2**22  # largest number of bytes in flight in one direction of a connection; beyond it the proxy stops reading
GRAIN_S = 0.01  # with a bandwidth limit, the proxy reads pieces that take about this long
_BACKLOG = 512
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 s, so that closing resets


class FaultProxy:
    """Listens on a port of this machine and forwards all bytes to `target` and back.

    `target` is "host:port", or "unix:/path". Bytes arrive in order, `delay_s` and up to `jitter_s` after they were
    sent, in each direction; each direction carries at most `bytes_per_s`, over all connections together. These three
    may be changed while the proxy runs; bytes in flight keep their times. Jitter is drawn from `seed`, separately for
    each connection and direction, so that it does not depend on how connections interleave.

    The proxy runs on the event loop that enters it. Leaving it resets open connections and leaves no task or socket.
    """

    def __init__(
        self,
        target: str,
        *,
        delay_s: float = 0.0,
        jitter_s: float = 0.0,
        bytes_per_s: float | None = None,
        seed: int = 0,
        host: str = "127.0.0.1",
    ) -> None:
        """`host`: the address of this machine on which clients reach it."""
        self.target = target
        self._host = host
        self.delay_s = delay_s
        self.jitter_s = jitter_s
        self.bytes_per_s = bytes_per_s
        self.bytes_up = 0  # delivered to the target
        self.bytes_down = 0  # delivered to clients
        self.accepted = 0  # connections so far
        self.thawed = asyncio.Event()
        self.thawed.set()
        self._seed = seed
        self._free_at: dict[Direction, float] = {"up": 0.0, "down": 0.0}  # when the limited link is idle again
        self._port: socket.socket | None = None  # bound but not listening: it reserves the port
        self._listener: socket.socket | None = None
        self._connections: dict[asyncio.Task[None], _Connection] = {}

    @property
    def address(self) -> str:
        """ "host:port" for clients."""
        if self._port is None:
            raise RuntimeError("the proxy has not been entered")
        host, port = self._port.getsockname()
        return f"{host}:{port}"

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    def cut(self) -> None:
        """Reset all connections at once; bytes in flight are lost. New connections work."""
        for task, connection in list(self._connections.items()):
            if connection.reset():
                task.cancel()

    def refuse(self) -> None:
        """Refuse new connections from now on. Open connections stay."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def accept(self) -> None:
        """Accept new connections again, after `refuse`."""
        if self._listener is None:
            host, port = self.address.split(":")
            self._listener = _bound(host, int(port))
            self._listener.listen(_BACKLOG)
            asyncio.get_running_loop().add_reader(self._listener, self._welcome, self._listener)

    def freeze(self) -> None:
        """Deliver nothing in either direction from now on, not even the end of a connection.

        Connections stay open and new ones can be made, as when the peer's machine has lost its power. The proxy holds
        sent bytes up to HELD; then senders block.
        """
        self.thawed.clear()

    def thaw(self) -> None:
        """Deliver again, after `freeze`, with the held bytes first. `cut` while frozen drops them instead."""
        self.thawed.set()

    def close_half(self, direction: Direction) -> None:
        """End one direction of all open connections: its receivers read the end, and sent bytes are dropped."""
        for connection in self._connections.values():
            connection.close_half(direction)

    def due(self, direction: Direction, size: int, jitter: random.Random) -> float:
        """Return when bytes that arrive now are to be delivered, as a time of the loop's clock."""
        now = asyncio.get_running_loop().time()
        sent = now
        if self.bytes_per_s is not None:
            sent = self._free_at[direction] = max(now, self._free_at[direction]) + size / self.bytes_per_s
        return sent + self.delay_s + (jitter.uniform(0.0, self.jitter_s) if self.jitter_s else 0.0)

    def held_bytes(self, direction: Direction) -> int:
        """Return how much of what goes in a direction is held back."""
        flows = (connection.flows.get(direction) for connection in self._connections.values())
        return sum(flow.size for flow in flows if flow is not None)

    def read_size(self) -> int:
        """Return the number of bytes to read at a time."""
        return CHUNK if self.bytes_per_s is None else max(1, min(CHUNK, int(self.bytes_per_s * GRAIN_S)))

    def count(self, direction: Direction, size: int) -> None:
        """Count delivered bytes."""
        if direction == "up":
            self.bytes_up += size
        else:
            self.bytes_down += size

    async def __aenter__(self) -> Self:
        self._port = _bound(self._host, 0)
        self.accept()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.refuse()
        self.cut()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if self._port is not None:
            self._port.close()

    def _welcome(self, listener: socket.socket) -> None:
        with suppress(BlockingIOError):
            while True:
                accepted, _ = listener.accept()
                accepted.setblocking(False)
                connection = _Connection(self, accepted, f"{self._seed}/{self.accepted}")
                self.accepted += 1
                task = asyncio.create_task(connection.run())
                self._connections[task] = connection
                task.add_done_callback(self._connections.pop)


class _Connection:
    """A client's connection and its connection to the target."""

    def __init__(self, proxy: FaultProxy, accepted: socket.socket, seed: str) -> None:
        self._proxy = proxy
        self._accepted = accepted
        self._seed = seed
        self._writers: list[asyncio.StreamWriter] = []
        self.flows: dict[Direction, _Flow] = {}
        self._ended = False

    async def run(self) -> None:
        """Forward until both directions have ended or one was reset."""
        try:
            await self._proxy.thawed.wait()
            client = await self._open(asyncio.open_connection(sock=self._accepted))
            target = await self._open(_connect(self._proxy.target))
            up = self.flows["up"] = _Flow(self._proxy, "up", client[0], target[1], self._seed)
            down = self.flows["down"] = _Flow(self._proxy, "down", target[0], client[1], self._seed)
            async with asyncio.TaskGroup() as group:
                for work in (up.receive(), up.deliver(), down.receive(), down.deliver()):
                    group.create_task(work)
            for writer in self._writers:
                writer.close()
                await writer.wait_closed()
        except* OSError:  # a peer reset its connection or cannot be reached: reset the other one
            pass
        finally:
            self.reset()
            for writer in self._writers:
                with suppress(OSError):
                    await writer.wait_closed()

    def reset(self) -> bool:
        """Reset the connections to both peers, unless they have ended in order. Return False the second time."""
        if self._ended:
            return False
        self._ended = True
        for end in [writer.get_extra_info("socket") for writer in self._writers] or [self._accepted]:
            with suppress(OSError):  # the socket is closed
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        for writer in self._writers:
            writer.transport.abort()
        if not self._writers:
            self._accepted.close()
        return True

    async def _open(self, opening: Coroutine[Any, Any, _Streams]) -> _Streams:
        streams = await opening
        self._writers.append(streams[1])
        return streams

    def close_half(self, direction: Direction) -> None:
        """End one direction."""
        if direction in self.flows:
            self.flows[direction].close()


class _Flow:
    """One direction of a connection: arrived bytes wait here until they are due."""

    def __init__(
        self,
        proxy: FaultProxy,
        direction: Direction,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        seed: str,
    ) -> None:
        self._proxy = proxy
        self._direction: Direction = direction
        self._source = source
        self._sink = sink
        self._jitter = random.Random(f"{seed}/{direction}")
        self._held: deque[tuple[float, bytes | OSError]] = deque()  # (due, bytes); b"" is the end
        self.size = 0  # bytes held
        self._filled = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._closed = False

    async def receive(self) -> None:
        """Receive from the source until its end."""
        latest = 0.0
        arrived: bytes | OSError = b"\0"
        while isinstance(arrived, bytes) and arrived:
            await self._room.wait()
            try:
                arrived = await self._source.read(self._proxy.read_size())
            except OSError as error:
                arrived = error
            size = len(arrived) if isinstance(arrived, bytes) else 0
            latest = max(latest, self._proxy.due(self._direction, size, self._jitter))
            if self._closed:
                continue
            self._held.append((latest, arrived))
            self.size += size
            if self.size >= HELD:
                self._room.clear()
            self._filled.set()

    async def deliver(self) -> None:
        """Deliver bytes when they are due, until the end. Raises the OSError of a lost source."""
        loop = asyncio.get_running_loop()
        while not self._closed:
            if not self._held:
                self._filled.clear()
                await self._filled.wait()
                continue
            due, arrived = self._held[0]
            if (left := due - loop.time()) > 0:
                await asyncio.sleep(left)
            await self._proxy.thawed.wait()
            if self._closed:
                return
            self._held.popleft()
            if isinstance(arrived, OSError):
                raise arrived
            await self._forward(arrived)

    async def _forward(self, data: bytes) -> None:
        if not data:
            self.close()
            return
        self.size -= len(data)
        self._room.set()
        try:
            self._sink.write(data)
            await self._sink.drain()
        except OSError:  # the receiver is lost; the other direction gets its error
            self._drop()
        else:
            self._proxy.count(self._direction, len(data))

    def close(self) -> None:
        """End the receiver's stream; held bytes and later ones are dropped."""
        if not self._closed:
            self._drop()
            with suppress(OSError, RuntimeError):
                self._sink.write_eof()

    def _drop(self) -> None:
        self._closed = True
        self._held.clear()
        self.size = 0
        self._room.set()
        self._filled.set()


def _bound(host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.setblocking(False)
    bound.bind((host, port))
    return bound


async def _connect(target: str) -> _Streams:
    if target.startswith("unix:"):
        return await asyncio.open_unix_connection(target.removeprefix("unix:"))
    host, _, port = target.rpartition(":")
    return await asyncio.open_connection(host, int(port))
