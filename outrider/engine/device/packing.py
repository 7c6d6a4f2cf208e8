"""Which rows of a call share a pass over the weights, and the numbers of rows for which passes are recorded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from outrider.engine.batch import Segment

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
MOST_ROWS = ROWS[-1]  # of a pass
OUTPUTS = tuple(rows for rows in ROWS if rows <= 256)  # rows of which the head computes logits together


class PassPart(NamedTuple):
    """A segment of a pass: one of the call's segments, or some of its rows."""

    call_index: int  # of the call's segment
    segment: Segment
    first_output: int  # among the outputs of the call's segment


def packed(segments: Sequence[Segment]) -> list[list[PassPart]]:
    """Return the parts of each pass, in order: as few passes as possible, each of at most `MOST_ROWS` rows.

    A chain that is too long for a pass is divided. Raises ValueError for a tree that is.
    """
    passes: list[list[PassPart]] = [[]]
    room = MOST_ROWS
    for index, segment in enumerate(segments):
        for part, first_output in _divided(segment, room):
            if len(part.tokens) > room:
                passes.append([])
                room = MOST_ROWS
            passes[-1].append(PassPart(index, part, first_output))
            room -= len(part.tokens)
    return [parts for parts in passes if parts]


def round_up(count: int, sizes: Sequence[int]) -> int:
    """Return the smallest of `sizes` that is not below `count`."""
    return sizes[bisect_left(sizes, count)]


def _divided(segment: Segment, room: int) -> Iterator[tuple[Segment, int]]:
    """Yield a segment as a whole where it fits into a pass, else chains that fill passes; with their first outputs."""
    count = len(segment.tokens)
    if count <= MOST_ROWS:
        yield segment, 0
        return
    if segment.mask is not None:
        raise ValueError(f"a tree of {count} rows, at most {MOST_ROWS} are possible")
    unwanted = count - segment.outputs
    start, stop = 0, room or MOST_ROWS
    while start < count:
        wanted = max(0, stop - max(start, unwanted))
        tokens, positions = segment.tokens[start:stop], segment.positions[start:stop]
        yield Segment(segment.slot, segment.prefix + start, tokens, positions, None, wanted), max(0, start - unwanted)
        start, stop = stop, min(stop + MOST_ROWS, count)
