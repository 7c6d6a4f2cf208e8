"""The interface of tree constructions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from outrider.core.session.contract import Plan
from outrider.core.tree.node import Node
from outrider.core.tree.token_tree import TokenTree


class TreeTerms(NamedTuple):
    """The limits of a tree's growth, and the measurements that it may use."""

    plan: Plan
    limit: int = 2**31  # nodes expanded in one pass at most
    min_path_score: float = 0.0  # path score below which a node is not worth verifying
    ahead: bool = False  # whether to draft also for the step after the running one
    level_cost_tokens: float = 0.0  # tokens that the time of one more level costs; 0: no step waits for it
    rates: tuple[float, ...] = ()  # [plan.width] measured acceptance rates by rank, never rising


class Construction(Protocol):
    """Grows a token tree level by level. A construction has no state: its decisions follow from the tree and the terms,
    so a tree that a commit re-rooted simply continues to grow.

    A node *is expanded* when `propose` has received its candidates. A step verifies the best `plan.nodes` of the sent
    nodes by path score; a construction with a fixed shape sends no more than that.
    """

    name: str
    guesses: bool = False  # whether the tree may hold nodes that no model has scored

    def width(self, plan: Plan) -> int:
        """Return the largest number of children of a node."""
        return plan.width

    def frontier(self, tree: TokenTree, terms: TreeTerms) -> list[Node]:
        """Return the nodes to expand in the next pass: at most `terms.limit`, parents before children.

        The root comes first if it is not expanded. An empty list means that the tree is complete.
        """

    def propose(self, tree: TokenTree, node: Node, scored: Sequence[tuple[int, float]], terms: TreeTerms) -> list[Node]:
        """Expand `node` with its best candidates and the logarithms of their probabilities, best first: [<= width].

        Return the nodes to send, parents before children. A repeated call adds candidates that were left out before and
        are wanted now.
        """

    def flush(self, tree: TokenTree, terms: TreeTerms) -> list[Node]:
        """Return the nodes that were held back, to be sent when nothing more is expanded, parents before children."""
        return []
