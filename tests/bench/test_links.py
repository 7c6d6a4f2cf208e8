"""The links of the suite distance: what they do to bytes, by the clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bench.faults import FaultProxy
from bench.links import DEFAULT_LINKS, parse_link
from outrider.errors import ConfigError
from tests.test_faults import Reader, Writer, closed, connect, listening, timed

PINGS = 24
LATE_S = 0.05  # longest delay of a busy machine


@asynccontextmanager
async def connected(link: str) -> AsyncIterator[tuple[Writer, Reader]]:
    """A connection over a link: where bytes go in, and where they come out."""
    async with listening() as peer, FaultProxy(peer.address, seed=7) as proxy:
        parse_link(link).apply(proxy)
        _, writer = await connect(proxy)
        reader, _ = await peer.next()
        yield writer, reader
        await closed(writer)


async def test_each_delay_of_the_jittery_link_is_drawn_separately() -> None:
    proxy, loop, jitter = FaultProxy(""), asyncio.get_running_loop(), random.Random(7)
    parse_link("jitter").apply(proxy)
    began = loop.time()
    due = [proxy.due("up", 1, jitter) for _ in range(PINGS)]
    spent = loop.time() - began
    again = random.Random(7)
    drawn = [again.uniform(0.0, 0.015) for _ in range(PINGS)]  # in one direction: half of a round trip
    assert all(-1e-9 <= at - began - delay <= spent + 1e-9 for at, delay in zip(due, drawn, strict=True))


async def test_a_byte_over_the_jittery_link_arrives_when_it_is_due() -> None:
    async with connected("jitter") as (writer, reader):
        taken = []
        for _ in range(PINGS):
            writer.write(b"x")
            taken.append(await timed(reader.readexactly(1)))
    assert 0.0055 < sum(taken) / PINGS < 0.0095 + LATE_S  # the mean of what the seed draws, and of late deliveries


async def test_the_jittery_link_keeps_the_order() -> None:
    async with connected("jitter") as (writer, reader):
        sent = bytes(range(PINGS))
        for number in sent:
            writer.write(bytes([number]))
            await writer.drain()
        assert await reader.readexactly(PINGS) == sent


async def test_the_narrow_link_carries_a_megabit_a_second() -> None:
    async with connected("narrow") as (writer, reader):
        writer.write(bytes(25_000))
        assert 0.19 <= await timed(reader.readexactly(25_000)) < 0.2 + 4 * LATE_S


async def test_another_link_begins_with_new_connections() -> None:
    async with listening() as peer, FaultProxy(peer.address) as proxy:
        reader, writer = await connect(proxy)
        await peer.next()
        parse_link("0").apply(proxy)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        await closed(writer)


def test_links_are_parsed_and_named() -> None:
    assert [parse_link(text).name for text in DEFAULT_LINKS] == [
        *("0 ms", "5 ms", "20 ms", "50 ms", "200 ms"),
        *("0 to 30 ms", "1 Mbit/s"),
    ]
    assert parse_link("20").delay_s == 0.01  # in each direction


@pytest.mark.parametrize("text", ["wide", "", "-1", "nan", "inf"])
def test_an_unknown_link_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be a round trip in milliseconds, or one of jitter, narrow"):
        parse_link(text)
