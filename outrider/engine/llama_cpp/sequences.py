"""Which sequences of llama.cpp hold the KV of our slots' rows.

llama.cpp knows no rows: a token's KV is a cell that belongs to one or more sequences, and a token sees the cells of its
sequence at positions up to its own. So each path of a tree, from the beginning of the text to a leaf, is a sequence
here, and a token belongs to the sequences of all leaves below it. What all paths of a slot have in common is its
*trunk*.

There are fewer sequences than there may be leaves. A leaf for which none is left is computed in one that is emptied
behind it: its row has no KV then, and is computed again when a later pass needs it. So is what a slot was to share with
another and could not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.engine.interface.batch import Segment


class SequenceMemory(Protocol):
    """llama.cpp's memory, as far as it is needed here."""

    def remove(self, sequence: int, first: int) -> None:
        """Take the cells at positions from `first` on out of a sequence."""

    def copy(self, source: int, target: int, end: int) -> None:
        """Add the cells of a sequence at positions before `end` to another one."""


@dataclass(slots=True, eq=False)
class KvRow:
    """A token of a slot, and where its KV is."""

    token: int
    position: int
    parent: KvRow | None  # the token before it on its path; None: it is the first
    in_trunk: bool = False  # its KV is in all sequences of the slot
    sequences: set[int] = field(default_factory=set)  # else: those that have it


@dataclass(slots=True, eq=False)
class BatchToken:
    """A token that a pass computes."""

    row: KvRow
    output: int  # index of its logits; -1: none are wanted
    sequences: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LonePath:
    """A path for which there was no sequence, behind the cells of `source` at positions before `end`."""

    tokens: list[BatchToken]
    source: int | None  # None: it begins the text
    end: int


@dataclass(slots=True)
class _Slot:
    rows: list[KvRow] = field(default_factory=list)
    trunk: int = 0  # rows [0, trunk) are in all sequences
    tips: dict[int, KvRow | None] = field(default_factory=dict)  # the last row of each sequence; None: it is empty

    @property
    def last(self) -> KvRow | None:
        """The last row of the trunk."""
        return self.rows[self.trunk - 1] if self.trunk else None


class SlotSequences:
    """The sequences of all slots."""

    def __init__(self, memory: SequenceMemory, slots: int, count: int) -> None:
        """`count`: sequences: one for each slot, further ones for trees, and the last for lone paths."""
        self._memory = memory
        self._slots = [_Slot() for _ in range(slots)]
        self._free = [*range(count - 1)]
        self.lone = count - 1

    def place(self, segment: Segment, first_output: int) -> tuple[list[BatchToken], list[LonePath]]:
        """Return what a pass computes for a segment: tokens, parents first, and behind them lone paths.

        `first_output`: index of the segment's first logits.
        """
        slot, kept = self._slots[segment.slot], segment.prefix + segment.span - len(segment.tokens)
        for at in range(len(slot.rows), kept):  # never written: as if it had been
            slot.rows.append(KvRow(0, at, slot.rows[-1] if slot.rows else None))
        self._settle(slot, segment.prefix)
        self._prune(slot, slot.rows[segment.prefix : kept])
        slot.rows[kept:] = _rows(slot.rows, segment, kept)
        tokens = _missing(slot, segment, kept, first_output)
        lone = self._assign(slot, tokens)
        self._lengthen(slot, segment.prefix)
        return [token for token in tokens if token.sequences], lone

    def move(self, slot: int, source: NDArray[np.int64], destination: NDArray[np.int64]) -> None:
        """Rename rows of a slot; all are read before one is written."""
        rows = self._slots[slot].rows
        for place, row in zip(destination, [rows[at] for at in source], strict=True):
            rows[place] = row

    def copy(self, source: int, target: int, count: int) -> None:
        """Let a slot have the first `count` rows of another."""
        ours, theirs = self._slots[source], self._slots[target]
        self.release(target, 0)
        if count > ours.trunk:
            self._settle(ours, count)
        shared = min(count, ours.trunk)
        before: KvRow | None = None
        for at, row in enumerate(ours.rows[:count]):
            before = KvRow(row.token, row.position, before, at < shared)
            theirs.rows.append(before)
        if shared:
            theirs.trunk = shared
            sequence = self._take(theirs)
            assert sequence is not None
            self._memory.copy(next(iter(ours.tips)), sequence, _end(theirs.last))
            theirs.tips[sequence] = theirs.last

    def release(self, slot: int, count: int) -> None:
        """Forget a slot's rows from `count` on."""
        it = self._slots[slot]
        if count < it.trunk:
            self._cut(it, count)
        del it.rows[count:]
        self._prune(it, it.rows[it.trunk :])
        if not count:
            self._drop(it, [*it.tips])

    def held(self, slot: int) -> int:
        """Return how many rows of a slot have KV, those that were dropped since its last pass included."""
        it = self._slots[slot]
        return it.trunk + len({id(row) for tip in it.tips.values() for row in _above(tip)})

    def _settle(self, slot: _Slot, prefix: int) -> None:
        """Make the prefix the trunk, or as much of it as has KV."""
        if prefix < slot.trunk:
            self._cut(slot, prefix)
            return
        end = prefix
        while end > slot.trunk and not slot.rows[end - 1].sequences:
            end -= 1
        if end > slot.trunk:
            self._drop(slot, [*(slot.tips.keys() - slot.rows[end - 1].sequences)])
            self._lengthen(slot, end)

    def _lengthen(self, slot: _Slot, count: int) -> None:
        """Make `count` rows the trunk, which have KV in all sequences of the slot."""
        for row in slot.rows[slot.trunk : count]:
            row.in_trunk = True
            row.sequences.clear()
        slot.trunk = count

    def _cut(self, slot: _Slot, count: int) -> None:
        """Make `count` rows the trunk, in one sequence, and leave all others without KV."""
        for tip in slot.tips.values():
            for row in _above(tip):
                row.sequences.clear()
        for row in slot.rows[count : slot.trunk]:
            row.in_trunk = False
        slot.trunk = min(slot.trunk, count)
        self._drop(slot, [*slot.tips][1:])
        for sequence in slot.tips:
            self._memory.remove(sequence, _end(slot.last))
            slot.tips[sequence] = slot.last

    def _prune(self, slot: _Slot, kept: Iterable[KvRow]) -> None:
        """Take all rows but the trunk's and the kept ones out of the slot's sequences. Of those that end with the trunk
        then, one stays.
        """
        stay = {*map(id, kept)}
        for sequence, tip in slot.tips.items():
            row = tip
            while row is not None and not row.in_trunk and id(row) not in stay:
                row.sequences.discard(sequence)
                row = row.parent
            if row is not tip:
                slot.tips[sequence] = row
                self._memory.remove(sequence, _end(row))
        spare = [sequence for sequence, tip in slot.tips.items() if tip is slot.last]
        self._drop(slot, spare[1:])

    def _assign(self, slot: _Slot, tokens: list[BatchToken]) -> list[LonePath]:
        """Give each path a sequence: the one that ends before it, or a new one. Return the paths that have none."""
        of_row = {id(token.row): token for token in tokens}
        parents = {id(token.row.parent) for token in tokens}
        ending: dict[int, list[int]] = {}
        for there, tip in slot.tips.items():
            ending.setdefault(id(tip), []).append(there)
        left_out: list[list[BatchToken]] = []
        for leaf in tokens:
            if id(leaf.row) in parents:
                continue
            path, before = [leaf], leaf.row.parent
            while before is not None and id(before) in of_row:
                path.append(of_row[id(before)])
                before = before.parent
            sequence: int | None
            if ends := ending.get(id(before)):
                sequence = ends.pop()
            elif (sequence := self._take(slot)) is not None and before is not None:
                self._memory.copy(_holder(slot, before), sequence, _end(before))
            if sequence is None:
                left_out.append(path)
                continue
            slot.tips[sequence] = leaf.row
            for token in path:
                token.sequences.append(sequence)
            for row in _above(before):
                row.sequences.add(sequence)
        for token in tokens:
            token.row.sequences.update(token.sequences)
        return [_lone(slot, path) for path in left_out]

    def _take(self, slot: _Slot) -> int | None:
        """Return a free sequence for a slot; None: those that are left are for slots that have none."""
        bare = sum(not it.tips for it in self._slots) - (not slot.tips)
        return self._free.pop() if len(self._free) > bare else None

    def _drop(self, slot: _Slot, sequences: Sequence[int]) -> None:
        """Free sequences."""
        for sequence in sequences:
            for row in _above(slot.tips.pop(sequence)):
                row.sequences.discard(sequence)
            self._memory.remove(sequence, 0)
            self._free.append(sequence)


def _end(row: KvRow | None) -> int:
    """Return the first position behind a row."""
    return 0 if row is None else row.position + 1


def _above(tip: KvRow | None) -> Iterator[KvRow]:
    """Yield the rows from a tip up to the trunk."""
    while tip is not None and not tip.in_trunk:
        yield tip
        tip = tip.parent


def _rows(rows: Sequence[KvRow], segment: Segment, kept: int) -> list[KvRow]:
    """Return the new rows of a segment."""
    before = [*rows[segment.prefix : kept]]
    root = rows[segment.prefix - 1] if segment.prefix else None
    for at, (token, position) in enumerate(zip(segment.tokens.tolist(), segment.positions.tolist(), strict=True)):
        if segment.mask is None:
            parent = before[-1] if before else root
        else:
            seen = np.flatnonzero(segment.mask[at, : len(before)])
            parent = before[seen[-1]] if len(seen) else root
        before.append(KvRow(token, position, parent))
    return before[kept - segment.prefix :]


def _missing(slot: _Slot, segment: Segment, kept: int, first_output: int) -> list[BatchToken]:
    """Return the tokens that have no KV and are needed: rows of the prefix, ancestors, and the new rows."""
    new = slot.rows[kept:]
    first_wanted = len(new) - segment.outputs
    tokens = [BatchToken(row, -1) for row in slot.rows[slot.trunk : segment.prefix]]
    known = {id(token.row) for token in tokens}
    for at, row in enumerate(new):
        absent = []
        before = row.parent
        while before is not None and not (before.in_trunk or before.sequences or id(before) in known):
            absent.append(BatchToken(before, -1))
            before = before.parent
        tokens += [*reversed(absent), BatchToken(row, first_output + at - first_wanted if at >= first_wanted else -1)]
        known.update(id(token.row) for token in tokens[-1 - len(absent) :])
    return tokens


def _holder(slot: _Slot, row: KvRow) -> int:
    """Return a sequence that has a row's KV."""
    return next(iter(slot.tips)) if row.in_trunk else min(row.sequences)


def _lone(slot: _Slot, path: Sequence[BatchToken]) -> LonePath:
    """Return a path from its leaf upwards as far as it has no sequences."""
    own = []
    for token in path:
        if token.sequences:
            break
        own.append(token)
    before = own[-1].row.parent
    source = None if before is None else _holder(slot, before)
    return LonePath(own[::-1], source, _end(before))
