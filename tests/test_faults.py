"""The fault proxy does to a link what its methods are named for, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import pytest_asyncio

from bench.faults import CHUNK, HELD, FaultProxy

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
QUIET_S = 0.15  # time in which nothing must happen


class Peer:
    """A server; each connection to it is handed out by `next`."""

    def __init__(self) -> None:
        self.address = ""
        self.waiting: asyncio.Queue[tuple[Reader, Writer]] = asyncio.Queue()
        self.writers: list[Writer] = []

    async def next(self) -> tuple[Reader, Writer]:
        return await asyncio.wait_for(self.waiting.get(), 5)

    def arrived(self, reader: Reader, writer: Writer) -> None:
        self.writers.append(writer)
        self.waiting.put_nowait((reader, writer))


@asynccontextmanager
async def listening(path: Path | None = None) -> AsyncIterator[Peer]:
    peer = Peer()
    if path is not None:
        server = await asyncio.start_unix_server(peer.arrived, path)
        peer.address = f"unix:{path}"
    else:
        server = await asyncio.start_server(peer.arrived, "127.0.0.1", 0)
        peer.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield peer
    finally:
        server.close()
        await closed(*peer.writers)


@pytest_asyncio.fixture
async def peer() -> AsyncIterator[Peer]:
    async with listening() as running:
        yield running


async def connect(proxy: FaultProxy) -> tuple[Reader, Writer]:
    host, _, port = proxy.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def closed(*writers: Writer) -> None:
    for writer in writers:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def silent(waiting: Awaitable[object]) -> bool:
    """Return whether nothing comes of it for a while."""
    try:
        await asyncio.wait_for(waiting, QUIET_S)
    except TimeoutError:
        return True
    return False


async def timed(waiting: Awaitable[object]) -> float:
    """How many seconds it takes."""
    began = asyncio.get_running_loop().time()
    await asyncio.wait_for(waiting, 10)
    return asyncio.get_running_loop().time() - began


@pytest.mark.parametrize("faults", [{}, {"delay_s": 0.01, "jitter_s": 0.02}, {"bytes_per_s": 2e7}], ids=str)
async def test_bytes_arrive_unchanged_and_in_order_and_are_counted(peer: Peer, faults: dict[str, float]) -> None:
    up, down = random.Random(1).randbytes(3_000_000), random.Random(2).randbytes(2_000_000)
    async with FaultProxy(peer.address, **faults) as proxy:
        reader, writer = await connect(proxy)
        far_reader, far_writer = await peer.next()
        writer.write(up)
        far_writer.write(down)
        assert await asyncio.gather(far_reader.readexactly(len(up)), reader.readexactly(len(down))) == [up, down]
        assert (proxy.bytes_up, proxy.bytes_down, proxy.accepted, proxy.connections) == (len(up), len(down), 1, 1)
        await closed(writer)


async def test_the_proxy_connects_to_unix_sockets(tmp_path: Path) -> None:
    async with listening(tmp_path / "socket") as peer, FaultProxy(peer.address) as proxy:
        _, writer = await connect(proxy)
        writer.write(b"hello")
        assert await (await peer.next())[0].readexactly(5) == b"hello"
        await closed(writer)


async def test_each_direction_is_delayed_and_the_delay_can_change(peer: Peer) -> None:
    async with FaultProxy(peer.address, delay_s=0.6) as proxy:
        reader, writer = await connect(proxy)
        far_reader, far_writer = await peer.next()
        writer.write(b"a")
        assert 0.6 <= await timed(far_reader.readexactly(1)) < 1.8
        far_writer.write(b"b")
        assert 0.6 <= await timed(reader.readexactly(1)) < 1.8
        writer.write(b"1")
        await asyncio.sleep(0.02)
        proxy.delay_s = 0.0
        writer.write(b"2")
        began = asyncio.get_running_loop().time()
        assert await far_reader.readexactly(2) == b"12"  # what is sent later does not overtake
        assert asyncio.get_running_loop().time() - began > 0.2
        writer.write(b"3")
        assert await timed(far_reader.readexactly(1)) < 0.5
        await closed(writer)


async def delays(seed: int) -> list[float]:
    """How long each of four bytes takes under jitter, in seconds."""
    async with listening() as peer, FaultProxy(peer.address, jitter_s=0.25, seed=seed) as proxy:
        _, writer = await connect(proxy)
        reader, _ = await peer.next()
        taken = []
        for _ in range(4):
            writer.write(b"x")
            taken.append(await timed(reader.readexactly(1)))
        await closed(writer)
    return taken


async def test_jitter_is_drawn_from_the_seed() -> None:
    first, again, other = await asyncio.gather(*map(delays, (3, 3, 4)))
    assert max(abs(one - two) for one, two in zip(first, again, strict=True)) < 0.04
    assert max(abs(one - two) for one, two in zip(first, other, strict=True)) > 0.08
    assert max(first) - min(first) > 0.08


async def test_a_narrow_link_is_shared_by_its_connections(peer: Peer) -> None:
    async with FaultProxy(peer.address, bytes_per_s=1e6) as proxy:
        writers, readers = [], []
        for _ in range(2):
            writers.append((await connect(proxy))[1])
            readers.append((await peer.next())[0])
        for writer in writers:
            writer.write(bytes(150_000))
        together = asyncio.gather(*(reader.readexactly(150_000) for reader in readers))
        assert 0.28 <= await timed(together) < 0.6
        proxy.bytes_per_s = None
        writers[0].write(bytes(150_000))
        assert await timed(readers[0].readexactly(150_000)) < 0.14  # it would take 0.15 s
        await closed(*writers)


async def test_a_cut_resets_both_peers_and_loses_bytes_in_flight(peer: Peer) -> None:
    async with FaultProxy(peer.address, delay_s=0.6) as proxy:
        reader, writer = await connect(proxy)
        far_reader, _ = await peer.next()
        writer.write(b"lost")
        await asyncio.sleep(0.02)
        proxy.cut()
        for end in (reader, far_reader):
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(end.read(), 1)
        _, again = await connect(proxy)
        again.write(b"new")
        assert await (await peer.next())[0].readexactly(3) == b"new"
        assert (proxy.bytes_up, proxy.accepted) == (3, 2)
        await closed(writer, again)


async def test_refuse_rejects_new_connections_and_keeps_open_ones(peer: Peer) -> None:
    async with FaultProxy(peer.address) as proxy:
        _, writer = await connect(proxy)
        far_reader, _ = await peer.next()
        address = proxy.address
        for _ in range(2):
            proxy.refuse()
            proxy.refuse()
            with pytest.raises(ConnectionRefusedError):
                await connect(proxy)
            writer.write(b"still here")
            assert await far_reader.readexactly(10) == b"still here"
            proxy.accept()
            proxy.accept()
            assert proxy.address == address
            _, again = await connect(proxy)
            await peer.next()
            await closed(again)
        await closed(writer)


async def test_a_frozen_link_delivers_nothing_and_a_thawed_one_everything(peer: Peer) -> None:
    async with FaultProxy(peer.address) as proxy:
        reader, writer = await connect(proxy)
        _, far_writer = await peer.next()
        proxy.freeze()
        writer.write(b"held")
        late_reader, late_writer = await connect(proxy)  # as with a machine that is gone, the network takes it
        await closed(far_writer)  # even the end of a connection does not arrive
        assert await silent(reader.read())
        assert peer.waiting.empty()
        assert proxy.bytes_up == 0
        proxy.thaw()
        assert await asyncio.wait_for(reader.read(), 1) == b""
        _, far_writer = await peer.next()
        far_writer.write(b"late")
        assert await late_reader.readexactly(4) == b"late"
        await closed(writer, late_writer)


async def test_bytes_held_by_a_frozen_link_arrive_in_order_after_the_thaw(peer: Peer) -> None:
    async with FaultProxy(peer.address) as proxy:
        _, writer = await connect(proxy)
        far_reader, _ = await peer.next()
        proxy.freeze()
        for part in range(5):
            writer.write(b"%d" % part)
            await asyncio.sleep(0.01)
        assert await silent(far_reader.read(1))
        proxy.thaw()
        assert await asyncio.wait_for(far_reader.readexactly(5), 1) == b"01234"
        await closed(writer)


async def test_a_frozen_link_holds_a_bounded_number_of_bytes(peer: Peer) -> None:
    async with FaultProxy(peer.address) as proxy:
        _, writer = await connect(proxy)
        far_reader, _ = await peer.next()
        proxy.freeze()
        sent = 0
        data = bytes(CHUNK)
        with suppress(TimeoutError):
            while True:
                writer.write(data)
                sent += len(data)
                await asyncio.wait_for(writer.drain(), QUIET_S)
        assert HELD <= proxy.held_bytes("up") < HELD + 2 * CHUNK
        assert sent > HELD
        proxy.thaw()
        assert len(await asyncio.wait_for(far_reader.readexactly(sent), 5)) == sent
        await closed(writer)


async def test_cutting_a_frozen_link_loses_its_held_bytes(peer: Peer) -> None:
    async with FaultProxy(peer.address) as proxy:
        reader, writer = await connect(proxy)
        far_reader, _ = await peer.next()
        proxy.freeze()
        writer.write(b"lost")
        await asyncio.sleep(0.02)
        proxy.cut()
        for end in (reader, far_reader):
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(end.read(), 1)
        assert proxy.bytes_up == 0
        await closed(writer)


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_closing_one_direction_leaves_the_other(peer: Peer, direction: str) -> None:
    async with FaultProxy(peer.address) as proxy:
        near = await connect(proxy)
        far = await peer.next()
        (sender, receiver) = (near, far) if direction == "up" else (far, near)
        proxy.close_half(direction)  # type: ignore[arg-type]
        assert await asyncio.wait_for(receiver[0].read(), 1) == b""
        sender[1].write(b"thrown away")
        receiver[1].write(b"through")
        assert await asyncio.wait_for(sender[0].readexactly(7), 1) == b"through"
        assert proxy.bytes_up + proxy.bytes_down == 7
        await closed(near[1])


async def test_an_end_or_a_reset_of_one_peer_reaches_the_other(peer: Peer) -> None:
    async with FaultProxy(peer.address, delay_s=0.05) as proxy:
        reader, writer = await connect(proxy)
        far_reader, far_writer = await peer.next()
        writer.write(b"last words")
        writer.write_eof()
        assert await far_reader.read() == b"last words"
        far_writer.write(b"answer")
        assert await reader.readexactly(6) == b"answer"
        linger = struct.pack("ii", 1, 0)
        far_writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        far_writer.transport.abort()
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 1)
        await closed(writer)


async def test_a_missing_target_resets_the_connection() -> None:
    async with FaultProxy("127.0.0.1:1") as proxy:
        reader, writer = await connect(proxy)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 1)
        await closed(writer)


async def nothing(proxy: FaultProxy) -> None: ...


async def freeze(proxy: FaultProxy) -> None:
    proxy.freeze()
    _, writer = await connect(proxy)
    await asyncio.sleep(0.02)
    await closed(writer)


async def slow_down(proxy: FaultProxy) -> None:
    proxy.delay_s = 60.0


async def refuse(proxy: FaultProxy) -> None:
    proxy.refuse()


async def halve(proxy: FaultProxy) -> None:
    proxy.close_half("up")


@pytest.mark.parametrize("trouble", [nothing, freeze, slow_down, refuse, halve])
async def test_a_closed_proxy_leaves_no_task_and_no_socket(
    peer: Peer, trouble: Callable[[FaultProxy], Awaitable[None]]
) -> None:
    tasks, files = asyncio.all_tasks(), len(os.listdir("/proc/self/fd"))
    writers = []
    async with FaultProxy(peer.address) as proxy:
        for number in range(30):
            _, writer = await connect(proxy)
            await peer.next()
            writers.append(writer)
            if number % 3 == 0:
                await closed(writer)
        await trouble(proxy)
        for writer in writers:
            writer.write(bytes(1000))
        await asyncio.sleep(0.02)
    await closed(*writers, *peer.writers)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == tasks
    assert len(os.listdir("/proc/self/fd")) == files
