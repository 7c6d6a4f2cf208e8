"""The inputs of passes: one buffer on the host, one on the device, and one copy between them for each pass.

Its first part is for the rows that want logits, at fixed places; behind it the layout depends on the pass's number of
rows. The buffers never move, so recorded graphs read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.sampling.noise import Draw, noise_keys
from outrider.core.sampling.restriction import Restriction
from outrider.engine.batch import Segment
from outrider.engine.device.packing import MOST_ROWS, OUTPUTS, PassPart
from outrider.engine.device.restrictions import OUTPUTS as RESTRICTED
from outrider.engine.device.tree_attention import TILE_COLUMNS, TREE_WORDS, AttentionPlan, lay_tiles

ArrayT = TypeVar("ArrayT")

FEWEST_MOVES, MOST_MOVES = 64, 256  # that a pass can begin with
_SMALL = np.dtype(np.int32)
_INTEGER = np.dtype(np.int64)
_FLOAT = np.dtype(np.float64)
_TORCH = {_SMALL: torch.int32, _INTEGER: torch.int64, _FLOAT: torch.float64}
_NO_DRAW = Draw(0, 0.0)  # of rows whose tokens are not chosen
_COUNTED = np.arange(MOST_ROWS)


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
    restrictions: tuple[Restriction | None, ...] = ()  # of their choice; (): none has any

    @classmethod
    def of(cls, parts: Sequence[PassPart], draws: Sequence[Draw | None], first: Sequence[int]) -> Outputs:
        """Return the outputs of a pass. `draws`, `first`: of each segment of the call, the latter its first place."""
        wanted = [part.segment.outputs for part in parts]
        total = sum(wanted)
        if not total:
            return NO_OUTPUTS
        counts = [len(part.segment.tokens) for part in parts]
        if wanted == counts:
            rows, positions = _COUNTED[:total], _joined([part.segment.positions for part in parts])
        else:  # the last rows of each segment
            sizes = list(zip(wanted, accumulate(counts), strict=True))
            rows = _joined([_COUNTED[end - count : end] for count, end in sizes])
            positions = _joined([it.segment.positions for it in parts])[rows]
        own = [draws[part.call_index] or _NO_DRAW for part in parts]
        drawn = [draws[part.call_index] is not None for part in parts]
        bases = np.array([draw.base for draw in own], np.uint64)
        temperatures = np.array([draw.temperature for draw in own])
        if len(parts) > 1:
            bases, temperatures = bases.repeat(wanted), temperatures.repeat(wanted)
        start = first[parts[0].call_index] + parts[0].first_output  # those of a pass follow one another
        return cls(
            rows,
            np.arange(start, start + total),
            np.ones(total, np.bool_) if all(drawn) else np.repeat(drawn, wanted),
            noise_keys(bases, positions + 1).view(np.int64),
            temperatures if len(parts) > 1 else temperatures.repeat(total),
            _restrictions(own, wanted),
        )

    def divided(self) -> list[Outputs]:
        """Return runs of as many outputs as the head computes together; at least one run."""
        most = RESTRICTED if self.restrictions else OUTPUTS[-1]
        if len(self.rows) <= most:
            return [self]
        runs = [slice(at, at + most) for at in range(0, len(self.rows), most)]
        return [
            Outputs(
                self.rows[run],
                self.places[run],
                self.drawn[run],
                self.keys[run],
                self.temperatures[run],
                self.restrictions[run],
            )
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


class _Layout(NamedTuple):
    """The places of the inputs of passes of one number of rows."""

    views: RowInputs[NDArray[Any]]
    host: Tensor  # what is copied
    device: Tensor


def moves_of(rows: int) -> int:
    """Return how many moves a pass of so many rows can begin with."""
    return min(max(FEWEST_MOVES, rows), MOST_MOVES)


class InputBuffers:
    """The buffers of an engine."""

    def __init__(self, plan: AttentionPlan, spare_row: int, device: torch.device) -> None:
        """`plan`: of the largest pass; `spare_row`: a row of each slot that no session uses."""
        self._cache_rows = np.arange(spare_row + 1)
        size = _row_fields(plan)[-1].stop
        pinned = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        self._bytes: NDArray[np.uint8] = self._host.numpy()
        self._layouts: dict[int, _Layout] = {}  # by rows
        self._outputs_end = _output_fields()[-1].stop
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
        layout = self._layout(plan)
        views = layout.views
        self._wait()
        counts = [len(it.tokens) for it in segments]
        used = sum(counts)
        if segments:
            ends = [it.prefix + it.span for it in segments]
            np.concatenate([it.tokens for it in segments], out=views.tokens[:used])
            np.concatenate([it.positions for it in segments], out=views.positions[:used])
            views.written_slots[:used] = np.repeat([it.slot for it in segments], counts)
            written = [self._cache_rows[end - count : end] for end, count in zip(ends, counts, strict=True)]
            np.concatenate(written, out=views.written_rows[:used])
            lay_tiles(segments, plan.tile_rows, views.tiles, views.trees)
        else:
            views.tiles.fill(0)
        if used < plan.rows:
            views.tokens[used:] = 0
            views.positions[used:] = 0
            views.written_slots[used:] = 0
            views.written_rows[used:] = self._cache_rows[-1]
        views.moves[:, : moves.shape[1]] = moves
        views.moves[0, moves.shape[1] :] = 0
        views.moves[1:, moves.shape[1] :] = self._cache_rows[-1]  # to itself: no move
        self._write_outputs(outputs)
        self._copy(layout.host, layout.device)

    def send_outputs(self, outputs: Outputs) -> None:
        """Write and begin to copy what the head reads for more outputs of the same pass."""
        self._wait()
        self._write_outputs(outputs)
        self._copy(self._host[: self._outputs_end], self._device[: self._outputs_end])

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

    def _copy(self, host: Tensor, device: Tensor) -> None:
        device.copy_(host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _layout(self, plan: AttentionPlan) -> _Layout:
        """Return the places of the inputs of a pass, found at its first use."""
        if plan.rows not in self._layouts:
            fields = _row_fields(plan)
            stop = fields[-1].stop
            views = RowInputs[NDArray[Any]](*(self._view(it) for it in fields))
            self._layouts[plan.rows] = _Layout(views, self._host[:stop], self._device[:stop])
        return self._layouts[plan.rows]

    def _view(self, field: _Field) -> NDArray[Any]:
        return self._bytes[field.start : field.stop].view(field.kind).reshape(field.shape)

    def _on_device(self, field: _Field) -> Tensor:
        return self._device[field.start : field.stop].view(_TORCH[field.kind]).reshape(field.shape)


def _restrictions(draws: Sequence[Draw], wanted: Sequence[int]) -> tuple[Restriction | None, ...]:
    """Return the restriction of each row; of each segment so many are wanted."""
    if all(draw.restriction is None for draw in draws):
        return ()
    return tuple(draw.restriction for draw, count in zip(draws, wanted, strict=True) for _ in range(count))


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
