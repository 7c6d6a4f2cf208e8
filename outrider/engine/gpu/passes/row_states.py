"""The state that each row of a pass of EAGLE heads continues: features of the target, or what its parent computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.gpu.attention.tree_attention import TREE_COLUMNS
from outrider.engine.gpu.passes.packing import MOST_ROWS
from outrider.engine.gpu.passes.staging import INTEGER, Staging, placed
from outrider.engine.heads.fed_texts import parent_rows, written_rows
from outrider.engine.interface.batch import Segment

WINDOW = TREE_COLUMNS  # rows of a slot whose computed states are there: those of a tree, and of its root


class RowStates:
    """The states of all slots.

    A state has a number: slot * kept + row % kept for the features of a text's row, and behind all of these
    slot * WINDOW + row % WINDOW for what a row has computed. The last number is that of states that nobody continues.
    """

    def __init__(
        self,
        slots: int,
        kept: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        base: Callable[[int], int] = lambda slot: 0,
    ) -> None:
        """`kept`: rows of each slot whose features are kept, the latest; `base`: returns the text's row that row 0 of a
        slot is.
        """
        self._kept = kept
        self._base = base
        self._ends = [0] * slots  # by slot: rows before this one continue features
        self._first = slots * kept  # number of the first computed state
        self.unused = self._first + slots * WINDOW
        self._fed = torch.zeros(self._first, width, dtype=dtype, device=device)
        self._computed = torch.zeros(slots * WINDOW + 1, width, device=device)
        fields = [*placed([(INTEGER, (MOST_ROWS,)), (INTEGER, (MOST_ROWS,))])]
        self._staging = Staging(fields[-1].stop, device)
        self._stop = fields[-1].stop
        self._arrays = [self._staging.array(it) for it in fields]
        self.sources, self.targets = map(self._staging.tensor, fields)  # [MOST_ROWS] numbers, by row of a pass
        self.targets.fill_(self.unused)

    @staticmethod
    def bytes_of(slots: int, kept: int, width: int, dtype: torch.dtype) -> int:
        """Return the bytes that an engine's row states need."""
        return slots * (kept * dtype.itemsize + WINDOW * 4) * width

    def feed(self, numbers: Tensor, features: Tensor) -> None:
        """Store features of texts' rows. `numbers`: of `fed_numbers`; `features`: [rows, width]."""
        self._fed.index_copy_(0, numbers, features.to(self._fed.dtype))

    def end(self, slot: int, rows: int) -> None:
        """Have a slot's rows from `rows` on continue computed states."""
        self._ends[slot] = rows

    def copy(self, source: int, target: int) -> None:
        """Give a slot the features that another one has."""
        by_slot = self._fed.view(-1, self._kept, self._fed.shape[1])
        by_slot[target] = by_slot[source]

    def fed_numbers(self, slots: int | NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of features."""
        found: NDArray[np.int64] = slots * np.int64(self._kept) + rows % self._kept
        return found

    def numbers(self, slots: int | NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of computed states."""
        found: NDArray[np.int64] = self._first + slots * np.int64(WINDOW) + rows % WINDOW
        return found

    def send(self, segments: Sequence[Segment]) -> None:
        """Begin to copy what the rows of a pass continue, and where the states go that they compute."""
        sources, targets = self._arrays
        self._staging.wait()
        targets.fill(self.unused)
        first = 0
        for it in segments:
            base = self._base(it.slot)
            rows, stop = np.array(written_rows(it)), first + len(it.tokens)
            above = self.numbers(it.slot, np.fromiter(parent_rows(it), np.int64, len(rows)))
            fed = self.fed_numbers(it.slot, rows + base)
            sources[first:stop] = np.where(rows + base < self._ends[it.slot], fed, above)
            targets[stop - it.outputs : stop] = self.numbers(it.slot, rows[len(rows) - it.outputs :])
            first = stop
        sources[first:] = self.unused
        self._staging.copy((0, self._stop))

    def read(self, count: int) -> Tensor:
        """Return the states that the rows of a pass continue: [count, width] float32."""
        sources = self.sources[:count]
        fed = self._fed[sources.clamp_max(self._first - 1)].float()
        computed = self._computed[(sources - self._first).clamp_min(0)]
        return torch.where((sources < self._first)[:, None], fed, computed)

    def write(self, states: Tensor) -> None:
        """Store what the rows of a pass have computed: [rows, width] float32."""
        self._computed.index_copy_(0, self.targets[: len(states)] - self._first, states)
