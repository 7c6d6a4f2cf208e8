"""Drafts with EAGLE inside a verifier on a device: the target's features stay there, and levels grow there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear

from outrider.core.construction.expansion import CANDIDATES
from outrider.core.sampling.noise import Draw
from outrider.engine.gpu.attention.page_table import pages_of
from outrider.engine.gpu.eagle.eagle import DeviceEagle
from outrider.engine.gpu.eagle.eagle_model import KEPT_ROWS, READ_AT_ONCE, SPARE_PAGES
from outrider.engine.gpu.engine import DeviceEngine
from outrider.engine.growth import GrownLevel
from outrider.engine.heads.drafted_rows import DraftedRows
from outrider.engine.heads.eagle import Eagle3
from outrider.engine.heads.speculator import HeadNodes, HeadRoot, KeptFeatures
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.logits import LogitsRow, logits_rows
from outrider.engine.tensor_parallel.group import ALONE


@dataclass(slots=True)
class _Text:
    """The text of a slot. Row i is that of token i + 1 and the features of token i."""

    tokens: NDArray[np.int64]  # [KEPT_ROWS] that rows have, by row % KEPT_ROWS
    first: int = 0  # rows [first, end) have features that are kept
    end: int = 0
    read: int = 0  # rows whose KV is computed; none of the others is before `first`

    def cut(self, rows: int) -> None:
        """Drop the rows from `rows` on."""
        self.end, self.read = min(self.end, rows), min(self.read, rows)
        self.first = min(self.first, self.end)

    def go_on(self, start: int, token: int) -> None:
        """Have the text end at row `start`. `token`: of the row before it, which may have been another text's.

        Raises ValueError if rows before it have no features.
        """
        if start > self.end:
            raise ValueError(f"rows [{self.end}, {start}) of a text have no features")
        self.cut(start)
        before = (start - 1) % KEPT_ROWS
        if self.first < start and self.tokens[before] != token:
            self.tokens[before] = token
            self.read = min(self.read, start - 1)

    def add(self, start: int, tokens: Sequence[int]) -> None:
        """Add rows with features; their tokens."""
        self.end = start + len(tokens)
        self.tokens[np.arange(start, self.end) % KEPT_ROWS] = tokens
        self.first = max(self.first, self.end - KEPT_ROWS)

    def is_complete(self, rows: int) -> bool:
        """Return whether it has `rows` rows, and features of the last one."""
        return self.first < self.end == rows


class DeviceEagleDrafts:
    """A `Speculator` with EAGLE heads on a device.

    Its KV follows that of the target: `copy` and `release` are called with the same slots and rows. A text is read when
    a round begins at its end, or when its features would not fit into the window any more.
    """

    all_levels_at_once = False
    grows_trees = True

    def __init__(self, target: DeviceEngine) -> None:
        """`target`: that was loaded with heads. From now on they follow its slots."""
        model, slots = target.eagle, target.slots
        if model is None:
            raise ValueError("the target was loaded without heads")
        self.depth = model.depth
        self._engine = DeviceEagle(
            model,
            target.tokenizer_digest,
            replace(target.runtime, group=ALONE),
            slots=slots,
            rows=target.rows,
            pages=min(slots * pages_of(target.rows), target.kv.table.pages + slots * SPARE_PAGES),
            window=KEPT_ROWS,
        )
        self.unpadded_vocabulary = self._engine.unpadded_vocabulary
        network, dtype = model.network, model.weights.embedding.dtype
        self._fuse = (
            network.fuse.weight.detach().to(target.runtime.device, dtype) if isinstance(network, Eagle3) else None
        )
        self._texts = [_Text(np.zeros(KEPT_ROWS, np.int64)) for _ in range(slots)]
        self._rows = DraftedRows()
        self._draws: dict[int, Draw | None] = {}  # of the round, by slot
        target.follow(self)

    def record(self) -> None:
        """Record passes of all numbers of rows; see `DeviceEngine.record`."""
        self._engine.record()

    def copy(self, source: int, target: int, rows: int) -> None:
        """Give a slot rows [0, rows) of another one."""
        text, copied = self._texts[source], self._texts[target]
        if source != target:
            copied.tokens[:] = text.tokens
            copied.first, copied.end, copied.read = text.first, text.end, text.read
            with torch.inference_mode():
                self._engine.states.copy(source, target)
        copied.cut(rows)
        self._engine.copy(source, target, copied.read)

    def release(self, slot: int, rows: int) -> None:
        """Release a slot's rows from `rows` on."""
        self._texts[slot].cut(rows)
        self._engine.release(slot, rows)

    def open_slot(self, slot: int, source: int | None, rows: int) -> None:
        pass  # the target's KV has been copied, and with it what is here

    def add_features(self, hidden: Tensor, kept: Sequence[KeptFeatures]) -> None:
        while kept:
            part = [it._replace(rows=it.rows[:READ_AT_ONCE]) for it in kept]
            self._make_room(part)
            slots = np.repeat([it.slot for it in part], [len(it.rows) for it in part])
            rows = np.concatenate([np.arange(it.start, it.start + len(it.rows)) for it in part])
            taken = np.concatenate([it.rows for it in part])
            self._feed(hidden, taken, self._engine.states.fed_numbers(slots, rows))
            for it in part:
                self._texts[it.slot].add(it.start, it.tokens[1 : 1 + len(it.rows)])
                self._engine.states.end(it.slot, self._texts[it.slot].end)
            kept = [
                KeptFeatures(it.slot, it.start + READ_AT_ONCE, it.rows[READ_AT_ONCE:], it.tokens[READ_AT_ONCE:])
                for it in kept
                if len(it.rows) > READ_AT_ONCE
            ]

    def begin(self, roots: Sequence[HeadRoot], levels: int = 0) -> tuple[list[LogitsRow | None], list[GrownLevel]]:
        ready = [self._texts[it.slot].is_complete(len(it.tokens) - 1) for it in roots]
        self._rows.begin(
            [(it.slot, len(it.tokens) - 1) if there else None for it, there in zip(roots, ready, strict=True)]
        )
        drafted = [root for root, there in zip(roots, ready, strict=True) if there]
        self._draws = {root.slot: root.draw for root in drafted}
        if not drafted:
            return [None] * len(roots), []
        segments, draws = [self._unread(it.slot, wanted=1) for it in drafted], [it.draw for it in drafted]
        grown: list[GrownLevel] = []
        if levels:
            # Row i of a slot is that of token i + 1.
            growths = [it.growth and replace(it.growth, base=it.growth.base - 1) for it in drafted]
            logits, grown = self._engine.grow(segments, draws, growths, levels)
            self._rows.grow([index for index, it in enumerate(roots) if ready[index] and it.growth], grown)
        else:
            logits = self._engine.sample(segments, draws, CANDIDATES)
        rows = iter(logits_rows(logits, 0, len(drafted)))
        return [next(rows) if there else None for there in ready], grown

    def expand(self, nodes: Sequence[HeadNodes]) -> list[LogitsRow]:
        segments, order = self._rows.expand(nodes)
        segments = [replace(it, positions=it.positions + 1) for it in segments]
        logits = self._engine.sample(segments, [self._draws[it.slot] for it in segments], CANDIDATES)
        return [LogitsRow(logits, row) for row in np.argsort(order).tolist()]

    def _make_room(self, kept: Sequence[KeptFeatures]) -> None:
        """Have texts end where rows begin, and read what would leave the window with these rows."""
        due = []
        for it in kept:
            text = self._texts[it.slot]
            text.go_on(it.start, it.tokens[0])
            if text.end - text.read + len(it.rows) > KEPT_ROWS:
                due.append(self._unread(it.slot, wanted=0))
        if due:
            self._engine.forward(due)

    def _feed(self, hidden: Tensor, rows: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        """Keep features of a pass's rows under the numbers of states."""
        with torch.inference_mode():
            taken, targets = self._engine.runtime.sent(np.stack([rows, numbers]))
            features = hidden.index_select(0, taken)
            if self._fuse is not None:
                features = linear(features.to(self._fuse.dtype), self._fuse)
            self._engine.states.feed(targets, features)

    def _unread(self, slot: int, wanted: int) -> Segment:
        """Return the rows of a text that are read now: those that were not, and the last one."""
        text = self._texts[slot]
        start, text.read = min(text.read, text.end - 1), text.end
        rows = np.arange(start, text.end)
        return Segment(slot, start, text.tokens[rows % KEPT_ROWS], rows + 1, None, wanted)
