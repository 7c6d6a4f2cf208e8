"""The message with which rank 0 sends a pass to the other ranks: changes of KV and adapters, then the segments.

A message without segments is a sign of life.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Engine

_CALLS: tuple[Literal["move", "copy", "release"], ...] = ("move", "copy", "release")  # of the engine, by number
_PIECE, _DROP, _SEGMENT = range(len(_CALLS), len(_CALLS) + 3)
_CHAIN, _ALL, _NONE = -1, -1, -1  # no mask; logits of all rows; no adapter


class KvChange(NamedTuple):
    """A call of `Engine.move`, `copy` or `release`."""

    call: Literal["move", "copy", "release"]
    numbers: tuple[int, ...]  # its first arguments
    rows: tuple[NDArray[np.int64], ...] = ()  # of `move`: source and destination

    def apply(self, engine: Engine) -> None:
        """Make the call."""
        getattr(engine, self.call)(*self.numbers, *self.rows)


@dataclass(frozen=True, slots=True)
class AdapterPiece:
    """A part of an adapter's files, which are sent one after another, in order."""

    number: int  # of the adapter
    file: int  # index of its file in `FILES`
    content: NDArray[np.uint8]  # [n] bytes
    last: bool  # whether the adapter is complete with it


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """The end of an adapter. No later message uses its number."""

    number: int


AdapterChange = AdapterPiece | DropAdapter
Change = KvChange | AdapterChange


def encode(changes: Sequence[Change], segments: Sequence[Segment]) -> NDArray[np.uint8]:
    """Return the message. Numbers are 64 bits each, the entries of a mask one bit each.

    The segments' adapters are given by their numbers.
    """
    parts: list[NDArray[np.int64]] = []
    for change in changes:
        match change:
            case KvChange(call, numbers, rows):
                sizes = [_CALLS.index(call), len(numbers), len(rows), len(rows[0]) if rows else 0]
                parts += [np.array([*sizes, *numbers]), *rows]
            case AdapterPiece(number, file, content, last):
                parts += [np.array([_PIECE, number, file, last, len(content)]), _as_numbers(content)]
            case DropAdapter(number):
                parts.append(np.array([_DROP, number]))
    for it in segments:
        span, wanted = _CHAIN if it.mask is None else it.span, _ALL if it.wanted is None else it.wanted
        adapter = _NONE if it.adapter is None else it.adapter
        assert isinstance(adapter, int)
        sizes = [_SEGMENT, it.slot, it.prefix, len(it.tokens), span, wanted, adapter]
        parts += [np.array(sizes), it.tokens, it.positions]
        if it.mask is not None:
            parts.append(_as_numbers(np.packbits(it.mask)))
    return np.concatenate(parts).astype(np.int64, copy=False).view(np.uint8) if parts else np.empty(0, np.uint8)


def decode(message: NDArray[np.uint8]) -> tuple[list[Change], list[Segment]]:
    """Return the changes and the segments of a message; the segments' adapters are their numbers."""
    changes: list[Change] = []
    segments: list[Segment] = []
    reader = _Reader(message.view(np.int64))
    while reader.more:
        match reader.number():
            case 0 | 1 | 2 as call:
                count, arrays, size = (reader.number() for _ in range(3))
                numbers = tuple(reader.take(count).tolist())
                changes.append(KvChange(_CALLS[call], numbers, tuple(reader.take(size) for _ in range(arrays))))
            case 3:
                number, file, last, size = (reader.number() for _ in range(4))
                changes.append(AdapterPiece(number, file, reader.take(-(-size // 8)).view(np.uint8)[:size], bool(last)))
            case 4:
                changes.append(DropAdapter(reader.number()))
            case _:
                segments.append(_segment(reader))
    return changes, segments


def _segment(reader: _Reader) -> Segment:
    slot, prefix, count, span, wanted, adapter = (reader.number() for _ in range(6))
    tokens, positions = reader.take(count), reader.take(count)
    mask = None
    if span != _CHAIN:
        bits = reader.take(-(-count * span // 64)).view(np.uint8)
        mask = np.unpackbits(bits, count=count * span).astype(np.bool_).reshape(count, span)
    outputs = None if wanted == _ALL else wanted
    return Segment(slot, prefix, tokens, positions, mask, outputs, None if adapter == _NONE else adapter)


def _as_numbers(content: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return bytes as numbers of 64 bits, the last one filled up with zeros."""
    return np.pad(content, (0, -len(content) % 8)).view(np.int64)


class _Reader:
    """Reads the numbers of a message in order."""

    def __init__(self, numbers: NDArray[np.int64]) -> None:
        self._numbers = numbers
        self._at = 0

    @property
    def more(self) -> bool:
        return self._at < len(self._numbers)

    def number(self) -> int:
        return int(self.take(1)[0])

    def take(self, count: int) -> NDArray[np.int64]:
        self._at += count
        return self._numbers[self._at - count : self._at]
