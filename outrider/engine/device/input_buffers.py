"""The inputs of a pass, with one layout for each bucket: a buffer on the host, one on the device, one copy between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.sampling.noise import Draw, noise_keys
from outrider.engine.batch import Segment
from outrider.engine.device.buckets import Bucket

ArrayT = TypeVar("ArrayT")

_BYTE = np.dtype(np.uint8)
_INTEGER = np.dtype(np.int64)
_FLOAT = np.dtype(np.float64)
_TORCH = {_BYTE: torch.uint8, _INTEGER: torch.int64, _FLOAT: torch.float64}


@dataclass(frozen=True)
class Inputs(Generic[ArrayT]):
    """Views of a buffer. Integers are int64, `temperatures` float64; `trees` has one byte for each entry."""

    tokens: ArrayT  # [rows]
    positions: ArrayT  # [rows]
    written_slots: ArrayT  # [rows] where a row's keys and values go; those of padding go to a row that no query sees
    written_rows: ArrayT  # [rows]
    row_of: ArrayT  # [slots * width] the row of each query, where rows do not have the order of queries
    query_of: ArrayT  # [rows] the query of each row
    slots: ArrayT  # [slots] slots whose KV is copied together, in a gathered bucket
    prefixes: ArrayT  # [slots]
    outputs: ArrayT  # [outputs] rows that want logits
    keys: ArrayT  # [outputs] of their noise
    temperatures: ArrayT  # [outputs]
    trees: ArrayT  # [slots, width, span] which rows behind the prefix a query sees


class _Field(NamedTuple):
    """The place of a view in the buffer."""

    kind: np.dtype[Any]
    shape: tuple[int, ...]
    start: int  # in bytes
    stop: int


_NO_DRAW = Draw(0, 0.0)  # of rows whose tokens are not chosen


class InputBuffers:
    """The buffers of one bucket. They never move, so a recorded graph can read them."""

    def __init__(self, bucket: Bucket, spare_row: int, device: torch.device) -> None:
        """`spare_row`: a row of each slot that no session uses."""
        self._bucket = bucket
        self._spare_row = spare_row
        fields = list(_fields(bucket))
        size = fields[-1].stop
        pinned = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        raw = self._host.numpy()
        self._views = Inputs[NDArray[np.generic]](
            *(raw[it.start : it.stop].view(it.kind).reshape(it.shape) for it in fields)
        )
        self.inputs = Inputs[Tensor](
            *(self._device[it.start : it.stop].view(_TORCH[it.kind]).reshape(it.shape) for it in fields)
        )

    def send(self, segments: Sequence[Segment], draws: Sequence[Draw | None]) -> None:
        """Write the inputs of a pass and begin to copy them. `segments`: by slot; `draws`: one for each segment."""
        if self._copied is not None:
            self._copied.synchronize()  # the last copy reads the buffer that is written now
        self._fill(segments, draws)
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def clear(self) -> None:
        """Send the inputs of a pass of padding alone."""
        self._blank()
        self._device.copy_(self._host)

    def _blank(self) -> None:
        """Write padding to all inputs."""
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
            segment = segments[index]
            trees[at[index], : counts[index], : segment.span] = segment.seen

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
        # The last rows of each segment, as indices among the rows of all segments.
        places = np.arange(total) + np.repeat(np.cumsum(counts) - np.cumsum(wanted), wanted)
        views.outputs[:total] = rows[places]
        drawn = [draw or _NO_DRAW for draw in draws]
        bases = np.repeat(np.array([draw.base for draw in drawn], np.uint64), wanted)
        positions = np.concatenate([it.positions for it in segments])[places]
        views.keys[:total] = noise_keys(bases, positions + 1).view(np.int64)
        views.temperatures[:total] = np.repeat([draw.temperature for draw in drawn], wanted)


def _fields(bucket: Bucket) -> Iterator[_Field]:
    """Yield the places of all views, in the order of `Inputs`; each begins at a multiple of eight bytes."""
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
