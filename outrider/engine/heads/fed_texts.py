"""Which rows of a drafter's texts have features of the target, and so can be computed by EAGLE heads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from outrider.engine.interface.batch import Segment


class FedTexts:
    """The texts of all slots. Row j of a slot is that of token j and the fused features of the token before it.

    Rows without features are left out: they have no KV, and no row sees them. These are the first rows of a text, row 0
    always among them, so the KV of a slot begins with its first row that has features: its *base*. Rows behind those
    with features are nodes.
    """

    def __init__(self, slots: int, rows: int) -> None:
        self._fed = [(rows, rows)] * slots  # by slot: rows [first, end) of its text have features
        self._base = [0] * slots

    def feed(self, slot: int, start: int, stop: int, *, restart: bool) -> None:
        """Note that rows [start, stop) have features. `restart`: those of another text are gone."""
        self._fed[slot] = start if restart else self._fed[slot][0], stop

    def base(self, slot: int) -> int:
        """Return the first row that has KV."""
        return self._base[slot]

    def end(self, slot: int) -> int:
        """Return the row behind the last one that has features."""
        return self._fed[slot][1]

    def copy(self, source: int, target: int, rows: int) -> int:
        """Note that a slot gets the KV of rows [0, rows) of another. Return how many of them have KV."""
        self._base[target] = self._base[source]
        return max(0, rows - self._base[source])

    def with_features(self, segment: Segment) -> Segment | None:
        """Return a segment without the rows that have no features; None: no row is left.

        Where rows are left out, the KV of the rows before them is of no use any more. Raises ValueError where rows are
        wanted that have none.
        """
        slot = segment.slot
        start = max(segment.prefix, self._fed[slot][0])
        if max(start, self._base[slot]) > segment.prefix:
            self._base[slot] = start
        skipped = start - segment.prefix
        if not skipped:
            return segment
        if skipped > len(segment.tokens) - max(1, segment.outputs):
            if segment.outputs:
                raise ValueError(f"segment of slot {segment.slot}: wants rows whose features were not fed")
            return None
        mask = None if segment.mask is None else segment.mask[skipped:, skipped:]
        return Segment(slot, start, segment.tokens[skipped:], segment.positions[skipped:], mask, segment.outputs)


def written_rows(segment: Segment) -> range:
    """Return the rows of the slot that a segment writes."""
    stop = segment.prefix + segment.span
    return range(stop - len(segment.tokens), stop)


def parent_rows(segment: Segment) -> Iterator[int]:
    """Yield, for each row that a segment writes, the row before it on its path."""
    if segment.mask is None:
        yield from range(segment.prefix - 1, segment.prefix - 1 + len(segment.tokens))
        return
    first = segment.span - len(segment.tokens)
    for row, sees in enumerate(segment.mask, first):
        seen = np.flatnonzero(sees[:row])
        yield segment.prefix + int(seen[-1]) if len(seen) else segment.prefix - 1
