"""The sizes at which passes are recorded. A pass runs at the smallest size that can hold it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from outrider.engine.batch import Segment

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
SLOTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CONTEXTS = (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 32768, 65536, 131072)
NARROW = 64  # rows up to which segments share a call; one with more rows is part of a prompt, and runs by itself
COPY_COSTS = 3  # cost of copying and reading the KV of a slot, over that of reading it in place


class Bucket(NamedTuple):
    """The sizes of a pass. Passes of one bucket share a recording."""

    rows: int  # of the linears
    slots: int  # that attention spans
    gathered: bool  # whether their KV is copied together first; else they are the cache's first slots, read in place
    width: int  # queries of a slot
    span: int  # cache rows behind the prefix that a slot's queries may see
    context: int  # cache rows of a slot that are read
    outputs: int  # rows that want logits

    @property
    def square(self) -> bool:
        """Whether rows have the order of attention's queries."""
        return self.rows == self.slots * self.width


def group_segments(segments: Sequence[Segment]) -> list[list[int]]:
    """Return the indices of the segments of each pass over the weights: all narrow ones together, by slot."""
    narrow = [index for index, segment in enumerate(segments) if len(segment.tokens) <= NARROW]
    wide = [[index] for index, segment in enumerate(segments) if len(segment.tokens) > NARROW]
    return [sorted(narrow, key=lambda index: segments[index].slot), *wide] if narrow else wide


def bucket_of(segments: Sequence[Segment], slots: int, rows: int) -> Bucket:
    """Return the bucket of segments that share a pass over the weights, in a cache of so many slots and rows."""
    reach = round_up(segments[-1].slot + 1, SLOTS, slots)
    count = round_up(len(segments), SLOTS, slots)
    gathered = reach > COPY_COSTS * count
    across = count if gathered else reach
    width = round_up(max(len(segment.tokens) for segment in segments), ROWS)
    used = round_up(sum(len(segment.tokens) for segment in segments), ROWS)
    square = across * width
    wanted = sum(segment.outputs for segment in segments)
    return Bucket(
        rows=min(square, used),
        slots=across,
        gathered=gathered,
        width=width,
        span=round_up(max(segment.span for segment in segments), ROWS),
        context=round_up(max(segment.prefix + segment.span for segment in segments), CONTEXTS, rows),
        outputs=round_up(wanted, ROWS) if wanted else 0,
    )


def round_up(count: int, sizes: Sequence[int], limit: int | None = None) -> int:
    """Return the smallest of `sizes` that is not below `count`, at most `limit`; above all, a multiple of the last."""
    at = bisect_left(sizes, count)
    size = sizes[at] if at < len(sizes) else -(-count // sizes[-1]) * sizes[-1]
    return size if limit is None else min(size, limit)
