"""Slots that share pages of KV have the rows that each would have alone, whatever is moved, copied and released."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.engine.gpu.attention.page_table import PAGE_ROWS, PageTable, pages_of

ROWS = 5 * PAGE_ROWS - 3
SLOTS = 4


class Cache:
    """The rows of all pages, as numbers, and those that each slot would have alone; -1: any."""

    def __init__(self, pages: int) -> None:
        self.table = PageTable(SLOTS, ROWS, pages)
        self.held = np.full((pages + 1) * PAGE_ROWS, -1)
        self.expected = np.full((SLOTS, ROWS), -1)
        self.written = 0

    def move(self, slot: int, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        self.table.move(slot, source, target)
        self.expected[slot, target] = self.expected[slot, source]

    def copy(self, source: int, target: int, rows: int) -> None:
        self.table.copy(source, target, rows)
        kept = self.expected[source, :rows].copy()
        self.expected[target] = -1
        self.expected[target, :rows] = kept

    def release(self, slot: int, rows: int) -> None:
        self.table.release(slot, rows)
        self.expected[slot, rows:] = -1

    def write(self, slot: int, first: int, end: int) -> None:
        """What a pass does: moves, and then new rows."""
        taken, free = self.table.needed(slot, first, end), self.table.free
        self.table.prepare(slot, first, end)
        assert self.table.free >= free - taken
        sources, targets = self.table.take_moves()
        assert len({*targets.tolist()}) == len(targets)
        self.held[targets] = self.held[sources]
        rows = np.arange(first, end)
        new = np.arange(self.written, self.written + len(rows))
        self.written += len(rows)
        self.held[self.table.places(slot, rows)] = new
        self.expected[slot, rows] = new

    def check(self) -> None:
        used = set()
        for slot in range(SLOTS):
            known = np.flatnonzero(self.expected[slot] >= 0)
            if not len(known):
                continue
            places = self.table.places(slot, known)
            assert self.held[places].tolist() == self.expected[slot, known].tolist()
            pages = self.table.of_slot(slot, int(known[-1]) + 1)
            assert len(pages) == pages_of(int(known[-1]) + 1)
            assert (pages > 0).all()
            used.update(pages.tolist())
        assert len(used) <= self.table.pages - self.table.free


@pytest.mark.parametrize("seed", range(30))
def test_slots_keep_their_own_rows_while_they_share_pages(seed: int) -> None:
    dice = np.random.default_rng(seed)
    cache = Cache(SLOTS * pages_of(ROWS))
    lengths = [0] * SLOTS
    for _ in range(60):
        slot = int(dice.integers(SLOTS))
        length = lengths[slot]
        what = dice.choice(["write", "move", "copy", "release"], p=[0.5, 0.25, 0.15, 0.1])
        if what == "move" and length > 3:
            count = int(dice.integers(1, min(length, 80)))
            cache.move(slot, dice.permutation(length)[:count], dice.permutation(length)[:count])
        elif what == "copy":
            target, rows = int(dice.integers(SLOTS)), int(dice.integers(0, length + 1))
            cache.copy(slot, target, rows)
            lengths[target] = rows
        elif what == "release":
            rows = int(dice.integers(0, length + 1))
            cache.release(slot, rows)
            lengths[slot] = min(length, rows)
        elif length < ROWS:
            first = int(dice.integers(max(0, length - 20), length + 1))
            end = min(ROWS, first + int(dice.integers(1, 150)))
            cache.write(slot, first, end)
            lengths[slot] = max(length, end)
            cache.check()
    for slot in range(SLOTS):
        cache.release(slot, 0)
    assert cache.table.free == cache.table.pages


def test_a_shared_page_is_not_copied_before_it_is_written() -> None:
    cache = Cache(12)
    cache.write(0, 0, 130)
    assert cache.table.free == 9
    for slot in (1, 2, 3):
        cache.copy(0, slot, 100)
    assert cache.table.free == 9
    assert (cache.table.needed(1, 100, 140), cache.table.needed(0, 130, 131), cache.table.needed(0, 60, 61)) == (
        2,
        0,
        1,
    )
    cache.write(1, 100, 101)
    assert cache.table.free == 8
    cache.check()
    assert not cache.table.take_moves().size


def test_a_full_page_table_takes_no_page_from_another_slot() -> None:
    cache = Cache(3)
    cache.write(0, 0, 2 * PAGE_ROWS)
    cache.write(1, 0, 1)
    with pytest.raises(RuntimeError, match="no page of KV is free"):
        cache.table.prepare(1, 1, PAGE_ROWS + 1)
    cache.release(0, PAGE_ROWS)
    cache.write(1, 1, PAGE_ROWS + 1)
    cache.check()
