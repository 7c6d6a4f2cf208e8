"""The inputs of passes: one buffer on the host, one on the device, and one copy between them for each pass.

Its first part is for the rows that want logits, at fixed places; behind it the layout depends on the pass's number of
rows. The buffers never move, so recorded graphs read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.sampling.noise import Draw, noise_keys
from outrider.engine.batch import Segment
from outrider.engine.device.packing import OUTPUTS, PassPart
from outrider.engine.device.tree_attention import TILE_COLUMNS, TREE_WORDS, AttentionPlan, lay_tiles

ArrayT = TypeVar("ArrayT")

FEWEST_MOVES = 64  # that a pass can begin with
_SMALL = np.dtype(np.int32)
_INTEGER = np.dtype(np.int64)
_FLOAT = np.dtype(np.float64)
_TORCH = {_SMALL: torch.int32, _INTEGER: torch.int64, _FLOAT: torch.float64}
_NO_DRAW = Draw(0, 0.0)  # of rows whose tokens are not chosen


@dataclass(frozen=True)
class RowInputs(Generic[ArrayT]):
    """What a pass of so many rows reads: int64, and int32 for attention."""

    tokens: ArrayT  # [rows]
    positions: ArrayT  # [rows]
    written_slots: ArrayT  # [rows] where a row's keys and values go; those of padding go to a row that no query sees
    written_rows: ArrayT  # [rows]
    moves: ArrayT  # [3, moves] slots, sources and targets of cache rows that are moved first
    tiles: ArrayT  # [tiles, TILE_COLUMNS] int32, see `lay_tiles`
    trees: ArrayT  # [rows, TREE_WORDS] int32


@dataclass(frozen=True)
class OutputInputs(Generic[ArrayT]):
    """What the head reads for the rows that want logits."""

    rows: ArrayT  # [outputs] int64
    keys: ArrayT  # [outputs] int64, of their noise
    temperatures: ArrayT  # [outputs] float64


@dataclass(frozen=True, slots=True)
class Outputs:
    """The rows that want logits, in the order of a pass."""

    rows: NDArray[np.int64]  # of the pass
    places: NDArray[np.int64]  # where their logits are in the result of the call
    drawn: NDArray[np.bool_]  # whether a token is chosen
    keys: NDArray[np.int64]  # of their noise
    temperatures: NDArray[np.float64]

    @classmethod
    def of(cls, parts: Sequence[PassPart], draws: Sequence[Draw | None], first: Sequence[int]) -> Outputs:
        """Return the outputs of a pass. `draws`, `first`: of each segment of the call, the latter its first place."""
        wanted = np.array([part.segment.outputs for part in parts])
        total = int(wanted.sum())
        if not total:
            return NO_OUTPUTS
        ends, stops = np.cumsum([len(part.segment.tokens) for part in parts]), np.cumsum(wanted)
        at = np.arange(total)
        rows = at + np.repeat(ends - stops, wanted)  # the last rows of each segment
        starts = np.array([first[part.call_index] + part.first_output for part in parts])
        own = [draws[part.call_index] for part in parts]
        bases = np.array([_NO_DRAW.base if draw is None else draw.base for draw in own], np.uint64)
        temperatures = np.array([_NO_DRAW.temperature if draw is None else draw.temperature for draw in own])
        positions = _joined([part.segment.positions for part in parts])[rows]
        return cls(
            rows,
            at + np.repeat(starts - stops + wanted, wanted),
            np.repeat([draw is not None for draw in own], wanted),
            noise_keys(np.repeat(bases, wanted), positions + 1).view(np.int64),
            np.repeat(temperatures, wanted),
        )

    def divided(self, most: int) -> list[Outputs]:
        """Return runs of at most so many outputs; at least one run."""
        if len(self.rows) <= most:
            return [self]
        runs = [slice(at, at + most) for at in range(0, len(self.rows), most)]
        return [
            Outputs(self.rows[run], self.places[run], self.drawn[run], self.keys[run], self.temperatures[run])
            for run in runs
        ]


class _Field(NamedTuple):
    """The place of a view in the buffer."""

    kind: np.dtype[Any]
    shape: tuple[int, ...]
    start: int  # in bytes
    stop: int


_NO_ROWS = np.empty(0, np.int64)
NO_OUTPUTS = Outputs(_NO_ROWS, _NO_ROWS, np.empty(0, np.bool_), _NO_ROWS, np.empty(0))


def moves_of(rows: int) -> int:
    """Return how many moves a pass of so many rows can begin with."""
    return max(FEWEST_MOVES, rows)


class InputBuffers:
    """The buffers of an engine."""

    def __init__(self, plan: AttentionPlan, spare_row: int, device: torch.device) -> None:
        """`plan`: of the largest pass; `spare_row`: a row of each slot that no session uses."""
        self._spare_row = spare_row
        size = _row_fields(plan)[-1].stop
        pinned = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        self._bytes: NDArray[np.uint8] = self._host.numpy()
        self._views: dict[int, RowInputs[NDArray[Any]]] = {}  # by rows
        self._outputs = OutputInputs[NDArray[Any]](*(self._view(it) for it in _output_fields()))

    def rows(self, plan: AttentionPlan) -> RowInputs[Tensor]:
        """Return what a pass reads on the device."""
        return RowInputs(*(self._on_device(it) for it in _row_fields(plan)))

    def outputs(self, count: int) -> OutputInputs[Tensor]:
        """Return what the head reads on the device."""
        return OutputInputs(*(self._on_device(it)[:count] for it in _output_fields()))

    def send(
        self,
        plan: AttentionPlan,
        segments: Sequence[Segment],
        outputs: Outputs,
        moves: NDArray[np.int64],
    ) -> None:
        """Write the inputs of a pass and begin to copy them. `moves`: [3, moves] slots, sources, targets."""
        self._wait()
        fields = _row_fields(plan)
        if plan.rows not in self._views:
            self._views[plan.rows] = RowInputs(*(self._view(it) for it in fields))
        views = self._views[plan.rows]
        counts = np.array([len(it.tokens) for it in segments], np.int64)
        used = int(counts.sum())
        ends = np.array([it.prefix + it.span for it in segments], np.int64)
        within = np.arange(used) - np.repeat(np.cumsum(counts) - counts, counts)  # of a row, in its segment
        for view, values, padding in (
            (views.tokens, _joined([it.tokens for it in segments]), 0),
            (views.positions, _joined([it.positions for it in segments]), 0),
            (views.written_slots, np.repeat(np.array([it.slot for it in segments], np.int64), counts), 0),
            (views.written_rows, np.repeat(ends - counts, counts) + within, self._spare_row),
        ):
            view[:used] = values
            view[used:] = padding
        views.moves[:, : moves.shape[1]] = moves
        views.moves[:, moves.shape[1] :] = 0  # row 0 to row 0: no move
        if segments:
            lay_tiles(segments, plan.tile_rows, views.tiles, views.trees)
        else:
            views.tiles.fill(0)
        self._write_outputs(outputs)
        self._copy(fields[-1].stop)

    def send_outputs(self, outputs: Outputs) -> None:
        """Write and begin to copy what the head reads for more outputs of the same pass."""
        self._wait()
        self._write_outputs(outputs)
        self._copy(_output_fields()[-1].stop)

    def _write_outputs(self, outputs: Outputs) -> None:
        count, views = len(outputs.rows), self._outputs
        for view, values in (
            (views.rows, outputs.rows),
            (views.keys, outputs.keys),
            (views.temperatures, outputs.temperatures),
        ):
            view[:count] = values
            view[count:] = 0

    def _wait(self) -> None:
        """Wait until the last copy has read the buffer that is written next."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, size: int) -> None:
        self._device[:size].copy_(self._host[:size], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _view(self, field: _Field) -> NDArray[Any]:
        return self._bytes[field.start : field.stop].view(field.kind).reshape(field.shape)

    def _on_device(self, field: _Field) -> Tensor:
        return self._device[field.start : field.stop].view(_TORCH[field.kind]).reshape(field.shape)


def _joined(arrays: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays) if arrays else np.empty(0, np.int64)


@cache
def _output_fields() -> list[_Field]:
    """Return the places of `OutputInputs`."""
    count = (OUTPUTS[-1],)
    return list(_placed([(_INTEGER, count), (_INTEGER, count), (_FLOAT, count)], 0))


@cache
def _row_fields(plan: AttentionPlan) -> list[_Field]:
    """Return the places of `RowInputs`."""
    rows = (plan.rows,)
    shapes: list[tuple[np.dtype[Any], tuple[int, ...]]] = [
        *((_INTEGER, rows) for _ in range(4)),
        (_INTEGER, (3, moves_of(plan.rows))),
        (_SMALL, (plan.capacity, TILE_COLUMNS)),
        (_SMALL, (plan.rows, TREE_WORDS)),
    ]
    return list(_placed(shapes, _output_fields()[-1].stop))


def _placed(shapes: Sequence[tuple[np.dtype[Any], tuple[int, ...]]], start: int) -> Iterator[_Field]:
    """Yield places one behind another; each begins at a multiple of sixteen bytes."""
    for kind, shape in shapes:
        start = -(-start // 16) * 16
        stop = start + prod(shape) * kind.itemsize
        yield _Field(kind, shape, start, stop)
        start = stop
