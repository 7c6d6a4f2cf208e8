"""The inputs of passes, in one copy to the device for each.

The buffer's first part is for the rows that want logits, at fixed places; behind it the layout depends on the pass's
number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.sampling.noise import Draw, noise_keys
from outrider.engine.gpu.attention.kv_memory import MOST_MOVES
from outrider.engine.gpu.attention.page_table import PageTable
from outrider.engine.gpu.attention.tree_attention import TILE_COLUMNS, TREE_WORDS, AttentionPlan, lay_tiles
from outrider.engine.gpu.passes.packing import MOST_ROWS, OUTPUTS, PassPart
from outrider.engine.gpu.passes.staging import FLOAT, INTEGER, SMALL, Field, Staging, placed
from outrider.engine.gpu.sampling.restricted_rows import RestrictedRow
from outrider.engine.gpu.sampling.restrictions import OUTPUTS as RESTRICTED
from outrider.engine.interface.batch import Segment

ArrayT = TypeVar("ArrayT")

FEWEST_MOVES = 64  # moves that the smallest pass has room for; the largest has room for `MOST_MOVES`
_NO_DRAW = Draw(0, 0.0)  # of rows whose tokens are not chosen
_COUNTED = np.arange(MOST_ROWS)


@dataclass(frozen=True)
class RowInputs(Generic[ArrayT]):
    """The inputs of a pass of some number of rows: int64, and int32 for attention."""

    tokens: ArrayT  # [rows]
    positions: ArrayT  # [rows]
    places: ArrayT  # [rows] where keys and values go; those of padding go to one that no query sees
    moves: ArrayT  # [2, moves] sources and targets of cache rows that are moved first
    tiles: ArrayT  # [tiles, TILE_COLUMNS] int32, see `lay_tiles`
    trees: ArrayT  # [rows, TREE_WORDS] int32
    pages: ArrayT  # int32, of the segments' texts behind one another


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
    restricted: tuple[RestrictedRow | None, ...] = ()  # how their choice is restricted; (): none is

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
            _restricted(parts, own),
        )

    def divided(self) -> list[Outputs]:
        """Return runs of as many outputs as the head computes together; at least one run."""
        most = RESTRICTED if self.restricted else OUTPUTS[-1]
        if len(self.rows) <= most:
            return [self]
        parts: tuple[Any, ...] = self.rows, self.places, self.drawn, self.keys, self.temperatures, self.restricted
        runs = [slice(at, at + most) for at in range(0, len(self.rows), most)]
        return [Outputs(*(part[run] for part in parts)) for run in runs]


_NO_ROWS = np.empty(0, np.int64)
NO_OUTPUTS = Outputs(_NO_ROWS, _NO_ROWS, np.empty(0, np.bool_), _NO_ROWS, np.empty(0))


class _Layout(NamedTuple):
    """The places of the inputs of passes of one number of rows."""

    views: RowInputs[NDArray[Any]]
    pages_start: int  # in bytes


def moves_of(rows: int) -> int:
    """Return how many moves a pass of `rows` rows can begin with."""
    return min(max(FEWEST_MOVES, rows), MOST_MOVES)


class InputBuffers:
    """The buffers of an engine."""

    def __init__(self, plan: AttentionPlan, table: PageTable, device: torch.device) -> None:
        """`plan`: of the largest pass; `table`: the pages of all slots."""
        self._table = table
        self._staging = Staging(_row_fields(plan)[-1].stop, device)
        self._layouts: dict[int, _Layout] = {}  # by rows
        self._outputs = OutputInputs[NDArray[Any]](*map(self._staging.array, _output_fields()))

    def rows(self, plan: AttentionPlan) -> RowInputs[Tensor]:
        """Return what a pass reads on the device."""
        return RowInputs(*map(self._staging.tensor, _row_fields(plan)))

    def outputs(self, count: int) -> OutputInputs[Tensor]:
        """Return what the head reads on the device."""
        return OutputInputs(*(self._staging.tensor(it)[:count] for it in _output_fields()))

    def send(
        self,
        plan: AttentionPlan,
        segments: Sequence[Segment],
        outputs: Outputs,
        moves: NDArray[np.int64],
    ) -> None:
        """Write the inputs of a pass and begin to copy them. `moves`: [2, moves] sources, targets."""
        views, pages_start = self._layout(plan)
        self._staging.wait()
        counts = [len(it.tokens) for it in segments]
        used, stop = sum(counts), pages_start
        if segments:
            ends = [it.prefix + it.span for it in segments]
            np.concatenate([it.tokens for it in segments], out=views.tokens[:used])
            np.concatenate([it.positions for it in segments], out=views.positions[:used])
            rows = _joined([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
            views.places[:used] = self._table.places(np.repeat([it.slot for it in segments], counts), rows)
            lay_tiles(segments, plan.tile_rows, views.tiles, views.trees)
            pages = _joined([self._table.of_slot(it.slot, end) for it, end in zip(segments, ends, strict=True)])
            views.pages[: len(pages)] = pages
            stop += pages.nbytes
        else:
            views.tiles.fill(0)
        for padded in (views.tokens, views.positions, views.places):
            padded[used:] = 0
        views.moves[:, : moves.shape[1]] = moves
        views.moves[:, moves.shape[1] :] = 0  # to itself: no move
        self._write_outputs(outputs)
        self._staging.copy((0, stop))

    def send_outputs(self, outputs: Outputs) -> None:
        """Write and begin to copy what the head reads for more outputs of the same pass."""
        self._staging.wait()
        self._write_outputs(outputs)
        self._staging.copy((0, _output_fields()[-1].stop))

    def _write_outputs(self, outputs: Outputs) -> None:
        count, views = len(outputs.rows), self._outputs
        for view, values in (
            (views.rows, outputs.rows),
            (views.keys, outputs.keys),
            (views.temperatures, outputs.temperatures),
        ):
            view[:count] = values
            view[count:] = 0

    def _layout(self, plan: AttentionPlan) -> _Layout:
        """Return the places of the inputs of a pass, found at its first use."""
        if plan.rows not in self._layouts:
            fields = _row_fields(plan)
            self._layouts[plan.rows] = _Layout(RowInputs(*map(self._staging.array, fields)), fields[-1].start)
        return self._layouts[plan.rows]


def _restricted(parts: Sequence[PassPart], draws: Sequence[Draw]) -> tuple[RestrictedRow | None, ...]:
    """Return how the choice of each row is restricted. `draws`: of each part."""
    if all(draw.restriction is None for draw in draws):
        return ()
    found: list[RestrictedRow | None] = []
    for part, draw in zip(parts, draws, strict=True):
        if draw.restriction is None:
            found += [None] * part.segment.outputs
        else:
            found += RestrictedRow.of_segment(part.segment, draw.restriction)
    return tuple(found)


def _joined(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays) if arrays else np.empty(0, np.int64)


@cache
def _output_fields() -> list[Field]:
    """Return the places of `OutputInputs`."""
    count = (OUTPUTS[-1],)
    return list(placed([(INTEGER, count), (INTEGER, count), (FLOAT, count)]))


@cache
def _row_fields(plan: AttentionPlan) -> list[Field]:
    """Return the places of `RowInputs`."""
    rows = (plan.rows,)
    shapes: list[tuple[np.dtype[Any], tuple[int, ...]]] = [
        *((INTEGER, rows) for _ in range(3)),
        (INTEGER, (2, moves_of(plan.rows))),
        (SMALL, (plan.capacity, TILE_COLUMNS)),
        (SMALL, (plan.rows, TREE_WORDS)),
        (SMALL, (plan.segments * plan.text_pages,)),
    ]
    return list(placed(shapes, _output_fields()[-1].stop))
