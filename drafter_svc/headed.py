"""Sessions that heads draft for: what was drafted was drafted from guessed states, and no row of it outlives a commit.

The nodes do: those below the committed path stay in both trees. As they are expanded again, level by level from true
features, the upstream hears what they are worth now.
"""

from __future__ import annotations

from collections.abc import Sequence

from drafter_svc.drawn import DrawnSession
from drafter_svc.ranked import RankedSession
from drafter_svc.session import DraftSession, Move
from outrider.core.growth import Fits
from outrider.core.tree import Node


class _Recomputed(DraftSession):
    """Keeps rows of committed tokens alone, and those of the tokens that its nodes have become are computed anew."""

    def commit(self, tokens: Sequence[int]) -> Move | None:
        """Follows the target. Nothing moves."""
        for node in [self.tree.root, *(node for level in self.tree.levels() for node in level)]:
            node.expanded = False
        return super().commit(tokens)


class HeadRankedSession(_Recomputed, RankedSession):
    """For rules that take any tree."""

    def commit(self, tokens: Sequence[int]) -> Move | None:
        """Also forgets what was said of guessed states."""
        move = super().commit(tokens)
        self._keep_rows(set())
        return move

    def frontier(self, fits: Fits, limit: int) -> list[Node]:
        """Of what the construction says, the nodes whose parents' states are known."""
        chosen = super().frontier(fits, limit)
        return [node for node in chosen if node.parent is None or node.parent.expanded]


class HeadDrawnSession(_Recomputed, DrawnSession):
    """For rules that hold p against q."""
