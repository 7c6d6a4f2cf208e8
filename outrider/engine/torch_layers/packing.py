"""Packs the segments of a pass into index tensors and attention calls, once a pass, for all layers.

Rows have the order that makes attention cheap: sessions of similar query and KV length in neighbouring slots form a
*run*, which is one attention call over a view of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.interface.batch import Segment

EXACT_ROWS = 32  # passes of up to this many rows run at their own size
ROW_TILE = 8  # larger passes run at multiples of this, because oneDNN compiles a kernel for each new size


@dataclass(frozen=True, slots=True)
class AttentionRun:
    """One attention call: neighbouring slots, their queries padded to one length."""

    slot: int  # the first
    slots: int
    keys: int  # cache rows [0, keys) of each slot are read
    width: int  # queries a slot
    start: int  # the run's first query among all queries of the pass
    segments: tuple[Segment, ...]  # by slot

    @property
    def stop(self) -> int:
        """The index behind the run's last query."""
        return self.start + self.slots * self.width


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Neighbouring cache rows of one slot."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class CacheCells:
    """Cache rows of any slots."""

    slots: Tensor  # [n] int64
    rows: Tensor  # [n] int64


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed pass: its rows, padded to a size that linears compute fast, and the indices of attention and head."""

    tokens: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    used: int  # rows that are not padding; the first ones
    runs: tuple[AttentionRun, ...]
    gather: Tensor | None  # [queries] int64: row of each query; None: queries are rows
    scatter: Tensor | None  # [rows] int64: query of each row; None: queries are rows
    written: KeyRange | CacheCells  # where the used rows' keys and values go
    outputs: Tensor | None  # [outputs_used or more, two at least] int64: rows that want logits; None: all
    outputs_used: int


def padded_size(rows: int) -> int:
    """Return how many rows a pass over `rows` rows computes. Never one: a single row is computed differently."""
    return max(2, rows if rows <= EXACT_ROWS else -(-rows // ROW_TILE) * ROW_TILE)


def pack(segments: Sequence[Segment]) -> Packed:
    """Return the packed pass of these segments."""
    members = [[segments[0]]] if len(segments) == 1 else _runs_of(segments)
    used = sum(len(segment.tokens) for segment in segments)
    rows = padded_size(used)
    tokens, positions = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    starts: dict[int, int] = {}  # slot -> its first row
    runs: list[AttentionRun] = []
    gather: list[NDArray[np.int64]] = []
    scatter = np.zeros(rows, np.int64)
    row = query = 0
    for index, run in enumerate(members):
        first, slots = run[0].slot, run[-1].slot - run[0].slot + 1
        width = max(len(segment.tokens) for segment in run)
        if index == len(members) - 1 and slots == 1:
            width += rows - used  # padding rows become queries too, which saves moving rows
        sources = np.zeros((slots, width), np.int64)
        for segment in run:
            count = len(segment.tokens)
            at = segment.slot - first
            tokens[row : row + count] = segment.tokens
            positions[row : row + count] = segment.positions
            starts[segment.slot] = row
            length = width if slots == 1 else count
            sources[at, :length] = np.arange(row, row + length)
            scatter[row : row + length] = np.arange(query + at * width, query + at * width + length)
            row += count
        keys = max(segment.prefix + segment.span for segment in run)
        runs.append(AttentionRun(first, slots, keys, width, query, tuple(run)))
        gather.append(sources.reshape(-1))
        query += slots * width
    same = query == rows and bool((scatter == np.arange(rows)).all())
    ends = [starts[segment.slot] + len(segment.tokens) for segment in segments]
    wants = zip(segments, ends, strict=True)
    outputs = np.concatenate([np.arange(end - segment.outputs, end) for segment, end in wants])
    outputs_used = len(outputs)
    every = np.array_equal(outputs, np.arange(used))
    if outputs_used:
        outputs = np.pad(outputs, (0, padded_size(outputs_used) - outputs_used), mode="edge")
    return Packed(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        used=used,
        runs=tuple(runs),
        gather=None if same else torch.from_numpy(np.concatenate(gather)),
        scatter=None if same else torch.from_numpy(scatter),
        written=_written(members),
        outputs=None if every else torch.from_numpy(outputs),
        outputs_used=outputs_used,
    )


def rows_of(packed: Packed, segments: Sequence[Segment]) -> Tensor:
    """Return the packed row of each row of a pass's segments, in their order: [used] int64."""
    starts, row = {}, 0
    for segment in (segment for run in packed.runs for segment in run.segments):
        starts[segment.slot] = row
        row += len(segment.tokens)
    return torch.from_numpy(np.concatenate([starts[it.slot] + np.arange(len(it.tokens)) for it in segments]))


def _length_class(segment: Segment) -> tuple[int, ...]:
    """Return a segment's class. Segments of one class may share an attention call: padding costs at most a factor."""
    return ((len(segment.tokens) - 1) >> 3).bit_length(), ((segment.prefix + segment.span - 1) >> 8).bit_length()


def _runs_of(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Group segments of one class in neighbouring slots; one unused slot between two is cheaper than a call."""
    runs: list[list[Segment]] = []
    last: tuple[int, ...] | None = None
    for length, segment in sorted(((_length_class(s), s) for s in segments), key=lambda item: (item[0], item[1].slot)):
        if length == last and segment.slot - runs[-1][-1].slot <= 2:
            runs[-1].append(segment)
        else:
            runs.append([segment])
        last = length
    return runs


def _written(members: Sequence[Sequence[Segment]]) -> KeyRange | CacheCells:
    """Return the cache rows of the new rows' keys and values, in packed order."""
    if len(members) == 1 and len(members[0]) == 1:
        segment = members[0][0]
        end = segment.prefix + segment.span
        return KeyRange(segment.slot, end - len(segment.tokens), end)
    packed = [segment for run in members for segment in run]
    ends = [segment.prefix + segment.span for segment in packed]
    counts = [len(segment.tokens) for segment in packed]
    slots = np.repeat(np.array([segment.slot for segment in packed], np.int64), counts)
    rows = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
    return CacheCells(torch.from_numpy(slots), torch.from_numpy(rows))
