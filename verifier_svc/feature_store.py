"""Fused features of the target, kept for remote drafters whose EAGLE heads start from them."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from outrider.core.acceptance import Walk
from outrider.engine.executor import Executor
from outrider.engine.kv.kv_slots import AcquiredSlot
from outrider.upstream.upstream_session import FusedFeatures
from verifier_svc.batch import StepBatch, kept_rows

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engine.heads.fusing import Fusion


class FeatureFuser:
    """Fuses and keeps the target's features for a step scheduler. This one keeps none."""

    digest: bytes = b""  # of the fusion; empty: nothing is fused

    def open(self, kv_slot: AcquiredSlot, executor: Executor) -> FusedFeatures | None:
        """Return the features of a session that begins in a slot; None: none are kept."""
        return None

    async def store(self, step: StepBatch, walks: Sequence[Walk | None], executor: Executor) -> None:
        """Keep the features of the rows that the step commits. Called after the pass and before the commit."""


class SessionFeatures(FusedFeatures):
    """The fused features of one session. Those of a warm prefix are kept as its KV is, but `known` counts none before a
    step has run: until then they may still have to be copied. A session whose KV was released keeps its features.
    """

    def __init__(self, rows: NDArray[np.uint16]) -> None:
        """`rows`: of the session's slot, [rows, width] uint16, the bits of bfloat16."""
        self.known = 0
        self.width = rows.shape[1]
        self._rows = rows

    def rows(self, start: int, stop: int) -> bytes:
        return self._rows[start:stop].tobytes()


class HeadFeatureFuser(FeatureFuser):
    """Fuses by one folder's heads. Rows are [slots, rows, width], in pages that are mapped when touched."""

    def __init__(self, fusion: Fusion, hidden: Callable[[], Tensor], *, slots: int, rows: int) -> None:
        """`hidden`: returns the features of every row of the last pass."""
        self.digest = fusion.digest
        self._fuse = fusion.fuse
        self._hidden = hidden
        memory = mmap.mmap(-1, slots * rows * fusion.width * 2)
        self._rows = np.frombuffer(memory, np.uint16).reshape(slots, rows, fusion.width)

    def open(self, kv_slot: AcquiredSlot, executor: Executor) -> FusedFeatures | None:
        if kv_slot.source is not None:
            executor.enqueue(partial(self._copy, kv_slot.source, kv_slot.slot, kv_slot.cached))
        return SessionFeatures(self._rows[kv_slot.slot])

    async def store(self, step: StepBatch, walks: Sequence[Walk | None], executor: Executor) -> None:
        taken: list[int] = []
        targets: list[tuple[int, int, int]] = []
        ends: list[tuple[FusedFeatures, int]] = []
        for work, _, rows in kept_rows(step, walks, every=True):
            fused, start, end = work.session.fused, work.start, work.start + len(rows)
            if fused is not None:
                start = max(start, min(fused.known, end))  # what is read again is known: drafters may be reading it
                ends.append((fused, max(fused.known, end)))
            if start < end:
                taken += rows[start - end :]
                targets.append((work.session.kv_slot.slot, start, end - start))
        if taken:
            await executor.call(partial(self._write, self._hidden()[taken], targets))
        for fused, known in ends:
            fused.known = known

    def _write(self, hidden: Tensor, targets: Sequence[tuple[int, int, int]]) -> None:
        fused, first = self._fuse(hidden), 0
        for slot, start, count in targets:
            self._rows[slot, start : start + count] = fused[first : first + count]
            first += count

    def _copy(self, source: int, slot: int, count: int) -> None:
        self._rows[slot, :count] = self._rows[source, :count]
