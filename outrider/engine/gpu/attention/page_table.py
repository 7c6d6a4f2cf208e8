"""Where the KV of sessions lies on a device: pages of 64 rows, which slots share until one of them writes.

The host alone decides; a pass gets the pages of its segments with its other inputs. A *place* is a row of all pages
together. Page 0 belongs to no slot: rows of padding are written there.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PAGE_ROWS = 64  # a multiple of the keys of a block in attention
TEXT_SPARE = 4  # pages beyond those of one text without which it could not be decoded: of its tree, and shared ones


def pages_of(rows: int) -> int:
    """Return how many pages `rows` rows take."""
    return -(-rows // PAGE_ROWS)


class PageTable:
    """The pages of all slots, and the moves of rows between them that wait for the next pass."""

    def __init__(self, slots: int, rows: int, pages: int) -> None:
        """`rows`: of a slot; `pages`: of all slots, of which each takes what its rows need."""
        self.pages = pages
        self._entries = np.zeros((slots, pages_of(rows)), np.int32)  # the pages of each slot
        self._held = [0] * slots  # how many it has
        self._users = [0] * (pages + 1)  # slots that have each page
        self._free = list(range(pages, 0, -1))
        self._origins = np.arange((pages + 1) * PAGE_ROWS)  # of each place: the one whose row will be moved there
        self._moved: list[NDArray[np.int64]] = []  # places to which rows will be moved

    @property
    def free(self) -> int:
        """Number of pages that no slot has."""
        return len(self._free)

    def needed(self, slot: int, first: int, end: int) -> int:
        """Return how many pages `prepare` takes at most, if the rows before `first` have pages."""
        held, entries = self._held[slot], self._entries[slot]
        return sum(
            index >= held or self._users[entries[index]] > 1 for index in range(first // PAGE_ROWS, pages_of(end))
        )

    def prepare(self, slot: int, first: int, end: int) -> None:
        """Give a slot pages for its rows [0, end), of which no other slot has those of [first, end)."""
        for index in range(first // PAGE_ROWS, min(self._held[slot], pages_of(end))):
            self._separate(slot, index)
        self._extend(slot, end)

    def release(self, slot: int, rows: int) -> None:
        """Take pages behind a slot's rows [0, rows) from it."""
        while self._held[slot] > pages_of(rows):
            self._held[slot] -= 1
            self._let_go(self._entries[slot, self._held[slot]])

    def copy(self, source: int, target: int, rows: int) -> None:
        """Let `target` have the rows [0, rows) of `source`, which must have pages for them; it loses its own."""
        if source == target:
            self.release(target, rows)
            return
        self._extend(source, rows)
        self.release(target, 0)
        count = pages_of(rows)
        self._entries[target, :count] = self._entries[source, :count]
        self._held[target] = count
        for page in self._entries[target, :count].tolist():
            self._users[page] += 1

    def move(self, slot: int, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Queue moves of a slot's rows. All are read before one is written."""
        if not len(source):
            return
        self._extend(slot, 1 + int(max(source.max(), target.max())))
        for index in {*(target // PAGE_ROWS).tolist()}:
            self._separate(slot, index)
        places = self.places(slot, target)
        self._origins[places] = self._origins[self.places(slot, source)]
        self._moved.append(places)

    def take_moves(self) -> NDArray[np.int64]:
        """Return all queued moves as one: [2, moves], the places that are read, and those that are written."""
        if not self._moved:
            return np.empty((2, 0), np.int64)
        targets = np.unique(np.concatenate(self._moved))
        sources = self._origins[targets]
        self._origins[targets] = targets
        self._moved = []
        changed = sources != targets
        return np.stack([sources[changed], targets[changed]])

    def of_slot(self, slot: int, rows: int) -> NDArray[np.int32]:
        """Return the pages of a slot's rows [0, rows)."""
        return self._entries[slot, : pages_of(rows)]

    def places(self, slots: int | NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the place of each row. `slots`: that of all rows, or of each."""
        found: NDArray[np.int64] = self._entries[slots, rows // PAGE_ROWS] * np.int64(PAGE_ROWS) + rows % PAGE_ROWS
        return found

    def _extend(self, slot: int, end: int) -> None:
        """Give a slot pages for its rows [0, end)."""
        while self._held[slot] < pages_of(end):
            self._entries[slot, self._held[slot]] = self._take()
            self._held[slot] += 1

    def _separate(self, slot: int, index: int) -> None:
        """Give a slot a page of its own, with the rows of the one that it has, if it shares that."""
        shared = int(self._entries[slot, index])
        if self._users[shared] == 1:
            return
        own = self._take()
        within = np.arange(PAGE_ROWS)
        places = own * PAGE_ROWS + within
        self._origins[places] = self._origins[shared * PAGE_ROWS + within]
        self._moved.append(places)
        self._entries[slot, index] = own
        self._let_go(shared)

    def _take(self) -> int:
        if not self._free:
            raise RuntimeError("no page of KV is free")
        page = self._free.pop()
        self._users[page] = 1
        return page

    def _let_go(self, page: int) -> None:
        self._users[page] -= 1
        if not self._users[page]:
            self._free.append(int(page))
