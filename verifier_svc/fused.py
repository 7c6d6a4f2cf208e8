"""The target's features after fusing, kept for drafters elsewhere whose EAGLE heads go on from them."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.core.rules import Walk
from outrider.engine.passes import Passes
from outrider.engine.slots import Taken
from outrider.sink.drafted import Fused
from verifier_svc.step import Step, kept_rows

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engine.heads.fusing import Fusion


class Fusing(Protocol):
    """What a step loop has fused."""

    digest: bytes  # of how; empty: it has nothing fused

    def open(self, place: Taken, passes: Passes) -> Fused | None:
        """A session begins in a slot."""

    async def keep(self, step: Step, walks: Sequence[Walk | None], passes: Passes) -> None:
        """A pass has run; comes before anything that it says is committed."""


class NoFusing(Fusing):
    """Nothing."""

    digest = b""

    def open(self, place: Taken, passes: Passes) -> Fused | None:
        return None

    async def keep(self, step: Step, walks: Sequence[Walk | None], passes: Passes) -> None:
        pass


class FusedRows(Fused):
    """One session's. Those of a warm prefix are there as its KV is, but none counts before a step has run: till then
    they may be still to be copied."""

    def __init__(self, rows: NDArray[np.uint16]) -> None:
        """`rows`: of its slot, [rows, width] in the bits of bfloat16."""
        self.known = 0
        self.width = rows.shape[1]
        self._rows = rows

    def rows(self, start: int, stop: int) -> bytes:
        return self._rows[start:stop].tobytes()


class HeadFusing(Fusing):
    """By the heads of one folder: [slots, rows, width], in pages that are mapped when they are touched."""

    def __init__(self, fusion: Fusion, hidden: Callable[[], Tensor], *, slots: int, rows: int) -> None:
        """`hidden`: the features of every row of the last pass."""
        self.digest = fusion.digest
        self._fuse = fusion.fuse
        self._hidden = hidden
        memory = mmap.mmap(-1, slots * rows * fusion.width * 2)
        self._rows = np.frombuffer(memory, np.uint16).reshape(slots, rows, fusion.width)

    def open(self, place: Taken, passes: Passes) -> Fused | None:
        if place.source is not None:
            passes.later(partial(self._copy, place.source, place.slot, place.cached))
        return FusedRows(self._rows[place.slot])

    async def keep(self, step: Step, walks: Sequence[Walk | None], passes: Passes) -> None:
        kept = [*kept_rows(step, walks, every=True)]
        if not kept:
            return
        hidden = self._hidden()[[row for _, rows in kept for row in rows]]
        places = [(work.session.place.slot, work.start, len(rows)) for work, rows in kept]
        await passes.call(partial(self._write, hidden, places))
        for (work, _), (_, start, count) in zip(kept, places, strict=True):
            if work.session.fused is not None:
                work.session.fused.known = start + count

    def _write(self, hidden: Tensor, places: Sequence[tuple[int, int, int]]) -> None:
        fused, first = self._fuse(hidden), 0
        for slot, start, count in places:
            self._rows[slot, start : start + count] = fused[first : first + count]
            first += count

    def _copy(self, source: int, slot: int, count: int) -> None:
        self._rows[slot, :count] = self._rows[source, :count]
