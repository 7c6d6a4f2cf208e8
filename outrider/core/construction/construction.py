"""What a tree construction is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from outrider.core.contract import Plan
from outrider.core.tree import Node, TokenTree


class Terms(NamedTuple):
    """What growth is bound by, and what it may know."""

    plan: Plan
    limit: int = 2**31  # nodes expanded in one pass
    price: float = 0.0  # path score below which a node is not worth verifying
    ahead: bool = False  # whether to draft also for the step after the running one
    level_price: float = 0.0  # tokens that the time of one more level costs; 0: nobody waits
    rates: tuple[float, ...] = ()  # [plan.width] measured acceptance by rank, falling


class Construction(Protocol):
    """Grows a token tree level by level. It keeps nothing: what it decides follows from the tree and the terms, so that
    a tree that was re-rooted by a commit simply grows on.

    A node *is expanded* when `propose` has seen its candidates. Of the told nodes a step verifies the best `plan.nodes`
    by path score; a construction with a fixed shape tells no more than that.
    """

    name: str
    guesses: bool  # whether nodes may be in the tree that no model has judged

    def width(self, plan: Plan) -> int:
        """Most children of a node."""
        ...

    def frontier(self, tree: TokenTree, terms: Terms) -> list[Node]:
        """The nodes to expand in the next pass: at most `terms.limit`, parents before children, the root first if it is
        not expanded. None: the tree is complete."""
        ...

    def propose(self, tree: TokenTree, node: Node, scored: Sequence[tuple[int, float]], terms: Terms) -> list[Node]:
        """Expands `node` with its best candidates and the logarithms of their chances, best first: [<= width].

        Returns the nodes to tell, parents before children. Repeating it adds what was left out, if it is wanted now.
        """
        ...

    def rest(self, tree: TokenTree, terms: Terms) -> list[Node]:
        """What was held back and is to be told now that nothing more will be expanded, parents before children."""
        ...
