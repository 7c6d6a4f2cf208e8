"""Padded event streams: pieces of one size, whatever comes when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from outrider.gateway.event_stream import PADDED_BYTES, paced


async def events(*pauses_and_texts: tuple[float, str]) -> AsyncGenerator[str, None]:
    for pause, text in pauses_and_texts:
        await asyncio.sleep(pause)
        yield f"data: {text}\n\n"


def read(pieces: list[str]) -> list[str]:
    """The events as a reader has them, without comments."""
    return [line for piece in pieces for line in piece.split("\n\n") if line and not line.startswith(":")]


async def test_pieces_have_one_size_and_come_without_events_too() -> None:
    source = events((0.0, "a"), (0.0, "b" * 900), (0.1, "c"), (0.0, "[DONE]"))
    pieces = [piece async for piece in paced(source, 0.02)]
    assert {len(piece.encode()) for piece in pieces} == {PADDED_BYTES}
    assert len(pieces) >= 5  # the pause is filled
    assert read(pieces) == ["data: a", "data: " + "b" * 900, "data: c", "data: [DONE]"]
    assert pieces[-1].endswith("data: [DONE]\n\n")


async def test_a_long_event_has_a_multiple_and_characters_count_by_their_bytes() -> None:
    pieces = [piece async for piece in paced(events((0.0, "é" * PADDED_BYTES)), 0.01)]
    assert {len(piece.encode()) % PADDED_BYTES for piece in pieces} == {0}
    assert read(pieces) == ["data: " + "é" * PADDED_BYTES]


async def test_an_error_of_the_source_ends_it_and_leaving_it_ends_the_source() -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncGenerator[str, None]:
        try:
            while True:
                yield "data: x\n\n"
                await asyncio.sleep(0.001)
        finally:
            closed.set()

    stream = paced(endless(), 0.01)
    for _ in range(3):
        await anext(stream)
    await stream.aclose()
    assert closed.is_set()

    async def broken() -> AsyncGenerator[str, None]:
        yield "data: x\n\n"
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        async for _ in paced(broken(), 0.01):
            pass
