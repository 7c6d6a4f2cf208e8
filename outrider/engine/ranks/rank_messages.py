"""The message with which rank 0 sends a pass to the other ranks: changes of the KV, then the segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.engine.batch import Segment
from outrider.engine.engine import Engine

_MOVE, _COPY, _RELEASE, _SEGMENT = range(4)
_CHAIN, _ALL = -1, -1  # no mask; logits of all rows


@dataclass(frozen=True, slots=True)
class MoveRows:
    """A call of `Engine.move`."""

    slot: int
    source: NDArray[np.int64]
    destination: NDArray[np.int64]

    def apply(self, engine: Engine) -> None:
        """Make the call."""
        engine.move(self.slot, self.source, self.destination)


@dataclass(frozen=True, slots=True)
class CopyRows:
    """A call of `Engine.copy`."""

    source: int
    target: int
    rows: int

    def apply(self, engine: Engine) -> None:
        """Make the call."""
        engine.copy(self.source, self.target, self.rows)


@dataclass(frozen=True, slots=True)
class ReleaseRows:
    """A call of `Engine.release`."""

    slot: int
    rows: int

    def apply(self, engine: Engine) -> None:
        """Make the call."""
        engine.release(self.slot, self.rows)


Change = MoveRows | CopyRows | ReleaseRows


def encode(changes: Sequence[Change], segments: Sequence[Segment]) -> NDArray[np.uint8]:
    """Return the message. Numbers are 64 bits each, the entries of a mask one bit each."""
    parts: list[NDArray[np.int64]] = []
    for change in changes:
        match change:
            case MoveRows(slot, source, destination):
                parts += [np.array([_MOVE, slot, len(source)]), source, destination]
            case CopyRows(source, target, rows):
                parts.append(np.array([_COPY, source, target, rows]))
            case ReleaseRows(slot, rows):
                parts.append(np.array([_RELEASE, slot, rows]))
    for it in segments:
        span, wanted = _CHAIN if it.mask is None else it.span, _ALL if it.wanted is None else it.wanted
        parts += [np.array([_SEGMENT, it.slot, it.prefix, len(it.tokens), span, wanted]), it.tokens, it.positions]
        if it.mask is not None:
            bits = np.packbits(it.mask)
            parts.append(np.pad(bits, (0, -len(bits) % 8)).view(np.int64))
    return np.concatenate(parts).astype(np.int64).view(np.uint8) if parts else np.empty(0, np.uint8)


def decode(message: NDArray[np.uint8]) -> tuple[list[Change], list[Segment]]:
    """Return the changes and the segments of a message."""
    changes: list[Change] = []
    segments: list[Segment] = []
    reader = _Reader(message.view(np.int64))
    while reader.more:
        match reader.number():
            case 0:
                slot, count = reader.number(), reader.number()
                changes.append(MoveRows(slot, reader.take(count), reader.take(count)))
            case 1:
                changes.append(CopyRows(reader.number(), reader.number(), reader.number()))
            case 2:
                changes.append(ReleaseRows(reader.number(), reader.number()))
            case _:
                segments.append(_segment(reader))
    return changes, segments


def _segment(reader: _Reader) -> Segment:
    slot, prefix, count, span, wanted = (reader.number() for _ in range(5))
    tokens, positions = reader.take(count), reader.take(count)
    mask = None
    if span != _CHAIN:
        bits = reader.take(-(-count * span // 64)).view(np.uint8)
        mask = np.unpackbits(bits, count=count * span).astype(np.bool_).reshape(count, span)
    return Segment(slot, prefix, tokens, positions, mask, None if wanted == _ALL else wanted)


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
