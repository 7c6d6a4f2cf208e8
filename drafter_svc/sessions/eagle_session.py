"""Sessions that EAGLE heads draft for: nodes are drafted from guessed states, so no KV row of a node survives a commit.

The nodes themselves stay: those below the committed path stay in both trees. They are expanded again, level by level,
from true features, and the upstream is sent their new scores.
"""

from __future__ import annotations

from collections.abc import Sequence

from drafter_svc.sessions.sampled_session import SampledSession
from drafter_svc.sessions.session import DrafterSession, KvMove
from drafter_svc.sessions.topk_session import TopKSession
from outrider.core.construction.expansion import DrafterFits
from outrider.core.tree.node import Node


class _Recomputed(DrafterSession):
    """Keeps rows of committed tokens alone; rows of nodes that were committed are computed anew."""

    def commit(self, tokens: Sequence[int]) -> KvMove | None:
        """Follows the commit. Return no rows to move."""
        for node in self.tree.root.subtree():
            node.expanded = False
        return super().commit(tokens)


class EagleTopKSession(_Recomputed, TopKSession):
    """For rules that take any tree."""

    def commit(self, tokens: Sequence[int]) -> KvMove | None:
        """Follows the commit, and drops the rows that were computed from guessed states."""
        move = super().commit(tokens)
        self._keep_rows(set())
        return move

    def frontier(self, fits: DrafterFits, limit: int) -> list[Node]:
        """Return those of the construction's nodes whose parents' states are known."""
        chosen = super().frontier(fits, limit)
        return [node for node in chosen if node.parent is None or node.parent.expanded]


class EagleSampledSession(_Recomputed, SampledSession):
    """For rules that compare p and q."""
