"""The rows that a round of EAGLE heads has computed: where each is in its slot, and what it sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.engine.growth import LEVEL_ROWS, GrownLevel
from outrider.engine.heads.speculator import HeadNodes
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.masks import path_mask


@dataclass(slots=True)
class _DraftedSlot:
    """The state of one slot in a round."""

    slot: int
    rows: int  # of its text
    drafted: int = 0  # rows of nodes behind them


@dataclass(frozen=True, slots=True)
class _DraftedRow:
    """One row that a round has computed."""

    slot: _DraftedSlot
    above: tuple[int, ...] = ()  # drafted rows that it sees, itself the last; (): a root


class DraftedRows:
    """The rows of a round by their numbers; see `Speculator`."""

    def __init__(self) -> None:
        self._rows: list[_DraftedRow | None] = []

    def begin(self, roots: Sequence[tuple[int, int] | None]) -> None:
        """Begin a round at the last rows of some texts: their slots and numbers of rows; None: nothing is drafted."""
        self._rows = [None if it is None else _DraftedRow(_DraftedSlot(*it)) for it in roots]

    def grow(self, roots: Sequence[int], levels: Sequence[GrownLevel]) -> None:
        """Number the rows of levels that grew below these roots."""
        trees = [[self._rows[root], *[None] * (LEVEL_ROWS - 1)] for root in roots]
        for level in levels:
            for tree, parents in zip(trees, level.parents.tolist(), strict=True):
                assert tree[0] is not None
                slot = tree[0].slot
                for row, parent in enumerate(parents, slot.drafted):
                    above = tree[parent] if parent >= 0 else None
                    tree.append(None if above is None else _DraftedRow(slot, (*above.above, row)))
                slot.drafted += LEVEL_ROWS
                self._rows += tree[-LEVEL_ROWS:]

    def expand(self, nodes: Sequence[HeadNodes]) -> tuple[list[Segment], list[int]]:
        """Number the rows of nodes. Return a segment for each of their slots, whose positions are those of rows, and
        for each row of these segments the index of its node.
        """
        by_slot: dict[int, list[int]] = {}
        found: list[_DraftedRow] = []
        for index, node in enumerate(nodes):
            parent = self._rows[node.parent]
            assert parent is not None  # the root of a text that is being read has no nodes
            found.append(_DraftedRow(parent.slot, (*parent.above, parent.slot.drafted)))
            parent.slot.drafted += 1
            by_slot.setdefault(parent.slot.slot, []).append(index)
        self._rows += found
        segments = [
            _segment([found[index] for index in of], [nodes[index].token for index in of]) for of in by_slot.values()
        ]
        return segments, [index for of in by_slot.values() for index in of]


def _segment(rows: Sequence[_DraftedRow], tokens: Sequence[int]) -> Segment:
    """Return the segment of the last rows that a slot has."""
    slot = rows[0].slot
    positions = np.array([slot.rows + len(row.above) - 1 for row in rows])
    return Segment(
        slot.slot, slot.rows, np.array(tokens), positions, path_mask([row.above for row in rows], slot.drafted)
    )
