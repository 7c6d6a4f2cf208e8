"""What a pass needs to know, laid out once for each bucket: one buffer here, one on the device, one copy between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.noise import Draw, noise_keys
from outrider.engine.batch import Segment
from outrider.engine.device.buckets import Bucket

ArrayT = TypeVar("ArrayT")

_BYTE = np.dtype(np.uint8)
_INTEGER = np.dtype(np.int64)
_FLOAT = np.dtype(np.float64)
_TORCH = {_BYTE: torch.uint8, _INTEGER: torch.int64, _FLOAT: torch.float64}


@dataclass(frozen=True)
class Inputs(Generic[ArrayT]):
    """Views of a buffer. Integers are int64, `temperatures` float64, `trees` one byte an entry."""

    tokens: ArrayT  # [rows]
    positions: ArrayT  # [rows]
    written_slots: ArrayT  # [rows] where a row's keys and values go; padding's to a row that nobody reads
    written_rows: ArrayT  # [rows]
    row_of: ArrayT  # [slots * width] the row of each query, where rows do not lie as attention takes them
    query_of: ArrayT  # [rows] and the query of each row
    slots: ArrayT  # [slots] whose KV is copied together, where it is
    prefixes: ArrayT  # [slots]
    outputs: ArrayT  # [outputs] rows that want logits
    keys: ArrayT  # [outputs] of their noise
    temperatures: ArrayT  # [outputs]
    trees: ArrayT  # [slots, width, span] which rows behind the prefix a query sees


class _Field(NamedTuple):
    """A view's place."""

    kind: np.dtype[Any]
    shape: tuple[int, ...]
    start: int  # in bytes
    stop: int


_NO_DRAW = Draw(0, 0.0)  # of rows that nobody asks about


class Staging:
    """The buffers of one bucket. They never move, so a recorded graph may read them."""

    def __init__(self, bucket: Bucket, spare_row: int, device: torch.device) -> None:
        """`spare_row`: of a slot, that no session uses."""
        self._bucket = bucket
        self._spare_row = spare_row
        fields = list(_fields(bucket))
        size = fields[-1].stop
        pinned = device.type == "cuda"
        self._here = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        self._there = torch.zeros(size, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        raw = self._here.numpy()
        self._views = Inputs[NDArray[np.generic]](
            *(raw[it.start : it.stop].view(it.kind).reshape(it.shape) for it in fields)
        )
        self.inputs = Inputs[Tensor](
            *(self._there[it.start : it.stop].view(_TORCH[it.kind]).reshape(it.shape) for it in fields)
        )

    def send(self, segments: Sequence[Segment], draws: Sequence[Draw | None]) -> None:
        """Lays the segments out and begins to copy that. `segments`: by slot; `asks`: one for each."""
        if self._copied is not None:
            self._copied.synchronize()  # the copy before reads what is written now
        self._fill(segments, draws)
        self._there.copy_(self._here, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def clear(self) -> None:
        """Sends a pass of nothing but padding."""
        self._blank()
        self._there.copy_(self._here)

    def _blank(self) -> None:
        for padded, value in (
            (self._views.tokens, 0),
            (self._views.positions, 0),
            (self._views.written_slots, 0),
            (self._views.written_rows, self._spare_row),
            (self._views.row_of, 0),
            (self._views.query_of, 0),
            (self._views.slots, 0),
            (self._views.prefixes, 0),
            (self._views.outputs, 0),
            (self._views.keys, 0),
            (self._views.temperatures, 0),
            (self._views.trees, 0),
        ):
            padded.fill(value)

    def _fill(self, segments: Sequence[Segment], draws: Sequence[Draw | None]) -> None:
        bucket, views = self._bucket, self._views
        self._blank()
        slots = np.array([it.slot for it in segments])
        at = np.arange(len(slots)) if bucket.gathered else slots
        counts = np.array([len(it.tokens) for it in segments])
        ends = np.array([it.prefix + it.span for it in segments])
        first = np.cumsum(counts) - counts
        within = np.arange(counts.sum()) - np.repeat(first, counts)  # of a row, in its segment
        queries = np.repeat(at * bucket.width, counts) + within
        rows = queries if bucket.square else np.arange(len(queries))
        views.tokens[rows] = np.concatenate([it.tokens for it in segments])
        views.positions[rows] = np.concatenate([it.positions for it in segments])
        views.written_slots[rows] = np.repeat(slots, counts)
        views.written_rows[rows] = np.repeat(ends - counts, counts) + within
        if not bucket.square:
            views.row_of[queries] = rows
            views.query_of[rows] = queries
        if bucket.gathered:
            views.slots[at] = slots
        views.prefixes[at] = [it.prefix for it in segments]
        self._fill_trees(segments, at, counts)
        if bucket.outputs:
            self._fill_outputs(segments, draws, rows, counts)

    def _fill_trees(self, segments: Sequence[Segment], at: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        trees = self._views.trees
        alone = np.array([it.mask is None for it in segments]) & (counts == 1)
        trees[at[alone], 0, 0] = 1
        for index in np.flatnonzero(~alone).tolist():
            segment, count = segments[index], counts[index]
            seen = np.tri(count, dtype=np.bool_) if segment.mask is None else segment.mask
            trees[at[index], :count, : segment.span] = seen

    def _fill_outputs(
        self,
        segments: Sequence[Segment],
        draws: Sequence[Draw | None],
        rows: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> None:
        views = self._views
        wanted = np.array([it.outputs for it in segments])
        total = int(wanted.sum())
        # Of each segment the last rows, among those of all segments.
        places = np.arange(total) + np.repeat(np.cumsum(counts) - np.cumsum(wanted), wanted)
        views.outputs[:total] = rows[places]
        drawn = [draw or _NO_DRAW for draw in draws]
        bases = np.repeat(np.array([draw.base for draw in drawn], np.uint64), wanted)
        positions = np.concatenate([it.positions for it in segments])[places]
        views.keys[:total] = noise_keys(bases, positions + 1).view(np.int64)
        views.temperatures[:total] = np.repeat([draw.temperature for draw in drawn], wanted)


def _fields(bucket: Bucket) -> Iterator[_Field]:
    """In the order of `Inputs`; each begins at a multiple of eight bytes."""
    rows, queries, outputs = (bucket.rows,), (bucket.slots * bucket.width,), (bucket.outputs,)
    apart = () if bucket.square else (1,)
    shapes: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...] = (
        *((_INTEGER, rows) for _ in range(4)),
        (_INTEGER, queries if apart else (0,)),
        (_INTEGER, rows if apart else (0,)),
        (_INTEGER, (bucket.slots if bucket.gathered else 0,)),
        (_INTEGER, (bucket.slots,)),
        (_INTEGER, outputs),
        (_INTEGER, outputs),
        (_FLOAT, outputs),
        (_BYTE, (bucket.slots, bucket.width, bucket.span)),
    )
    start = 0
    for kind, shape in shapes:
        stop = start + prod(shape) * kind.itemsize
        yield _Field(kind, shape, start, stop)
        start = -(-stop // 8) * 8
