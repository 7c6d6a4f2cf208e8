"""The proxy that makes networks bad does what it says, and leaves nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bench.faults import FaultProxy


@asynccontextmanager
async def echo() -> AsyncIterator[str]:
    """A server that says back what it hears."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def connect(proxy: FaultProxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = proxy.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def round_trip(streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], data: bytes = b"x") -> float:
    began = time.monotonic()
    streams[1].write(data)
    assert await streams[0].readexactly(len(data)) == data
    return time.monotonic() - began


async def test_bytes_pass_unchanged_and_are_counted_and_nothing_is_left() -> None:
    tasks = len(asyncio.all_tasks())
    async with echo() as server, FaultProxy(server) as proxy:
        streams = await connect(proxy)
        data = bytes(range(256)) * 4000
        writing = asyncio.create_task(round_trip(streams, data))
        await writing
        assert (proxy.sent, proxy.received) == (len(data), len(data))
        streams[1].close()
    await asyncio.sleep(0.05)
    assert len(asyncio.all_tasks()) <= tasks


async def test_delay_and_jitter_hold_in_each_direction_and_keep_the_order() -> None:
    async with echo() as server, FaultProxy(server, delay_s=0.03, jitter_s=0.02, seed=4) as proxy:
        streams = await connect(proxy)
        assert 0.06 <= await round_trip(streams) < 0.5
        for number in range(50):
            streams[1].write(bytes([number]))
            await asyncio.sleep(0.001)
        assert await streams[0].readexactly(50) == bytes(range(50))
        proxy.delay_s = proxy.jitter_s = 0.0
        assert await round_trip(streams) < 0.05
        streams[1].close()


async def test_a_rate_bounds_the_throughput() -> None:
    async with echo() as server, FaultProxy(server, bytes_per_s=1_000_000) as proxy:
        streams = await connect(proxy)
        assert await round_trip(streams, bytes(300_000)) >= 0.28
        streams[1].close()


async def test_a_cut_resets_what_is_open_and_new_connections_work() -> None:
    async with echo() as server, FaultProxy(server) as proxy:
        streams = await connect(proxy)
        await round_trip(streams)
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            await streams[0].readexactly(1)
        again = await connect(proxy)
        await round_trip(again)
        again[1].close()


async def test_a_frozen_network_says_nothing_and_loses_nothing() -> None:
    async with echo() as server, FaultProxy(server) as proxy:
        streams = await connect(proxy)
        proxy.freeze()
        streams[1].write(b"held")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await streams[0].read(1)
        proxy.thaw()
        assert await streams[0].readexactly(4) == b"held"
        streams[1].close()


async def test_refused_connections_end_at_once() -> None:
    async with echo() as server, FaultProxy(server) as proxy:
        proxy.refuse()
        streams = await connect(proxy)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await streams[0].readexactly(1)
        proxy.accept()
        again = await connect(proxy)
        await round_trip(again)
        again[1].close()


async def test_an_end_of_stream_passes() -> None:
    async with echo() as server, FaultProxy(server) as proxy:
        reader, writer = await connect(proxy)
        writer.write(b"last")
        writer.write_eof()
        assert await reader.read() == b"last"
        writer.close()
