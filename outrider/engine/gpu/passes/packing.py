"""Which rows of a call share a pass over the weights, and the numbers of rows for which passes are recorded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from outrider.engine.gpu.attention.tree_attention import TREE_COLUMNS
from outrider.engine.interface.batch import Segment

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
MOST_ROWS = ROWS[-1]  # of a pass
OUTPUTS = tuple(rows for rows in ROWS if rows <= 256)  # rows of which the head computes logits together


class PassPart(NamedTuple):
    """A segment of a pass: one of the call's segments, or some of its rows."""

    call_index: int  # of the call's segment
    segment: Segment
    first_output: int  # among the outputs of the call's segment


def packed(segments: Sequence[Segment]) -> list[list[PassPart]]:
    """Return the parts of each pass, in order, each of at most `MOST_ROWS` rows.

    A segment that does not fit into what is left of a pass begins the next one. A chain that is too long for a pass is
    divided, and a chain with a tree behind it into the two where the tree's bits would not hold both. Raises ValueError
    for a tree that is too large by itself.
    """
    passes: list[list[PassPart]] = [[]]
    room = MOST_ROWS
    for index, segment in enumerate(segments):
        output = 0
        for piece in _chain_and_tree(segment):
            for part in _divided(piece, room):
                if len(part.tokens) > room:
                    passes.append([])
                    room = MOST_ROWS
                passes[-1].append(PassPart(index, part, output))
                room -= len(part.tokens)
                output += part.outputs
    return [parts for parts in passes if parts]


def check_trees(segments: Sequence[Segment]) -> None:
    """Raise ValueError for a tree that is too large by itself."""
    for segment in segments:
        _chain_and_tree(segment)


def round_up(count: int, sizes: Sequence[int]) -> int:
    """Return the smallest of `sizes` that is not below `count`."""
    return sizes[bisect_left(sizes, count)]


def _chain_and_tree(segment: Segment) -> list[Segment]:
    """Return a segment as it is, or its leading chain and the tree behind it where its mask is too wide for tiles."""
    mask = segment.mask
    if mask is None or segment.span <= TREE_COLUMNS:
        return [segment]
    count = len(segment.tokens)
    chain = 0
    if segment.span == count:
        branched = (mask != np.tri(count, dtype=np.bool_)).any(0)  # columns that some row behind does not see
        if not branched.any():
            return [replace(segment, mask=None)]
        chain = int(np.argmax(branched))
    if segment.span - chain > TREE_COLUMNS or count - chain > MOST_ROWS:
        raise ValueError(
            f"segment of slot {segment.slot}: a tree of {count - chain} rows over {segment.span - chain} cache rows, "
            f"of at most {MOST_ROWS} and {TREE_COLUMNS}"
        )
    prefix, tokens, positions, outputs = segment.prefix, segment.tokens, segment.positions, segment.outputs
    tree = min(outputs, count - chain)
    return [
        replace(segment, tokens=tokens[:chain], positions=positions[:chain], mask=None, wanted=outputs - tree),
        replace(
            segment,
            prefix=prefix + chain,
            tokens=tokens[chain:],
            positions=positions[chain:],
            mask=mask[chain:, chain:],
            wanted=tree,
        ),
    ]


def _divided(segment: Segment, room: int) -> Iterator[Segment]:
    """Yield a segment as a whole where it fits into a pass, else chains that fill passes."""
    count = len(segment.tokens)
    if count <= MOST_ROWS:
        yield segment
        return
    unwanted = count - segment.outputs
    start, stop = 0, room or MOST_ROWS
    while start < count:
        wanted = max(0, stop - max(start, unwanted))
        tokens, positions = segment.tokens[start:stop], segment.positions[start:stop]
        prefix = segment.prefix + start
        yield replace(segment, prefix=prefix, tokens=tokens, positions=positions, mask=None, wanted=wanted)
        start, stop = stop, min(stop + MOST_ROWS, count)
