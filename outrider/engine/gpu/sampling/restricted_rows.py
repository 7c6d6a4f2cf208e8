"""How the choice of each row of a pass is restricted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.core.sampling.restriction import Restriction
from outrider.engine.interface.batch import Segment


class RestrictedRow(NamedTuple):
    """How the choice of one row's token is restricted."""

    restriction: Restriction
    slot: int
    position: int  # of the token
    path: NDArray[np.int64] | None  # the tokens behind the committed ones, for penalties; None: they are not known

    @classmethod
    def of_segment(cls, segment: Segment, restriction: Restriction) -> Iterator[RestrictedRow]:
        """Yield those of the rows that want logits."""
        positions = segment.positions[len(segment.positions) - segment.outputs :] + 1
        paths: Iterable[NDArray[np.int64] | None] = [None] * segment.outputs
        if restriction.history is not None:
            paths = _paths(segment, len(restriction.history.tokens))
        for position, path in zip(positions.tolist(), paths, strict=True):
            yield cls(restriction, segment.slot, position, path)


def grouped(rows: Sequence[RestrictedRow | None]) -> Iterator[tuple[int, list[RestrictedRow]]]:
    """Yield neighbouring rows of one restriction, behind the index of their first."""
    for _, group in groupby(enumerate(rows), key=lambda pair: pair[1] and id(pair[1].restriction)):
        own = [*group]
        if own[0][1] is not None:
            yield own[0][0], [it for _, it in own if it is not None]


def _paths(segment: Segment, committed: int) -> Iterator[NDArray[np.int64] | None]:
    """Yield, for each row that wants logits, its tokens behind the `committed` ones.

    None for a row whose path has tokens that are not in the segment.
    """
    count, columns = len(segment.tokens), segment.span - len(segment.tokens)
    ahead = segment.positions >= committed
    for row in range(count - segment.outputs, count):
        seen = ahead[: row + 1] if segment.mask is None else ahead & segment.mask[row, columns:]
        path = segment.tokens[: len(seen)][seen]
        yield path if len(path) == max(0, segment.positions[row] + 1 - committed) else None
