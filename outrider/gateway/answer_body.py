"""The body of a complete answer, whose JSON is made while it is sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

PIECE_CHARACTERS = 2**15  # of JSON that is made before it is sent, or one entry of a list


async def body_pieces(content: Any) -> AsyncIterator[bytes]:
    """Yield the JSON of a response in pieces, so that neither memory nor the event loop has all of it at a time."""
    held, size = [], 0
    for piece in json_pieces(content):
        held.append(piece)
        size += len(piece)
        if size >= PIECE_CHARACTERS:
            yield "".join(held).encode()
            held, size = [], 0
            await asyncio.sleep(0)
    yield "".join(held).encode()


def json_pieces(value: Any) -> Iterator[str]:
    """Yield the JSON of a value in pieces. An iterator in it, alone or in objects, becomes a list, entry by entry."""
    if isinstance(value, Iterator):
        mark = "["
        for entry in value:
            yield mark
            yield from json_pieces(entry)
            mark = ","
        yield "[]" if mark == "[" else "]"
    elif isinstance(value, dict):
        mark = "{"
        for key, entry in value.items():
            yield f"{mark}{_dump(key)}:"
            yield from json_pieces(entry)
            mark = ","
        yield "{}" if mark == "{" else "}"
    else:
        yield _dump(value)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
