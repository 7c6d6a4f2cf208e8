"""Constructions that choose nodes by their path scores. Under a rule that holds p against q that is not lossless:
whether a node is there would depend on what was drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from outrider.core.construction.construction import Terms
from outrider.core.contract import Plan
from outrider.core.growth import floor_score, frontier, propose
from outrider.core.tree import Node, TokenTree


class BestFirst:
    """The best unexpanded nodes of the whole tree, wherever they are: what a step can hold is expanded best first, and
    what is found is told at once. The default (`outrider.core.growth`)."""

    name = "best-first"
    guesses = True

    def width(self, plan: Plan) -> int:
        """The plan's."""
        return plan.width

    def frontier(self, tree: TokenTree, terms: Terms) -> list[Node]:
        """Best first by path score, across levels."""
        return frontier(tree, terms.plan, terms.price, terms.limit, ahead=terms.ahead)

    def propose(self, tree: TokenTree, node: Node, scored: Sequence[tuple[int, float]], terms: Terms) -> list[Node]:
        """Adds and tells what is worth its price."""
        return propose(tree, node, scored, floor_score(terms.price, ahead=terms.ahead))

    def rest(self, tree: TokenTree, terms: Terms) -> list[Node]:
        """Nothing."""
        return []


class OptTree(BestFirst):
    """Level by level, no further than pays: a level is expanded where its nodes are among the best n of the tree, and
    growth stops when the level before has added no more than a threshold to the sum of path scores of those best n.

    Source: OPT-Tree (Wang et al., arXiv 2406.17276), algorithm 1. The best n nodes maximise the sum, which is the
    expected number of accepted tokens, among all trees of n nodes (theorem 3.2).
    """

    name = "opt-tree"
    guesses = False

    def __init__(self, threshold: float = 0.05) -> None:
        """`threshold`: tokens that a level must be expected to add, delta in the paper."""
        self._threshold = threshold

    def frontier(self, tree: TokenTree, terms: Terms) -> list[Node]:
        """The nodes of the shallowest level that has unexpanded ones among the best n, the best of them first."""
        plan = terms.plan
        if not tree.root.expanded or not plan.depth:
            return [tree.root][: plan.depth]
        best = list(islice(tree.best_first(depth=plan.depth, width=plan.width), plan.nodes))
        waiting = [node for _, node in best if not node.expanded and tree.depth(node) < plan.depth]
        if not waiting:
            return []
        deepest = max(tree.depth(node) for _, node in best)
        level = min(map(tree.depth, waiting))
        if level == deepest and self._added(tree, plan, best) <= max(self._threshold, terms.level_price):
            return []
        return [node for node in waiting if tree.depth(node) == level][: terms.limit]

    def _added(self, tree: TokenTree, plan: Plan, best: Sequence[tuple[float, Node]]) -> float:
        """What the deepest level has added to the sum over the best n."""
        deepest = max(tree.depth(node) for _, node in best)
        before = islice(tree.best_first(depth=deepest - 1, width=plan.width), plan.nodes)
        return sum(score for score, _ in best) - sum(score for score, _ in before)


class Eagle2:
    """Expand and re-rank: of each level the best k nodes are expanded, down to the plan's depth; then, of all that was
    drafted, the best n are told, and nothing before.

    Source: EAGLE-2 (Li et al., arXiv 2406.16858), sections 4.1 and 4.2. The paper's k is here two numbers: how many
    nodes a pass expands, and how many children each of them gets.
    """

    name = "eagle-2"
    guesses = False

    def width(self, plan: Plan) -> int:
        """The plan's."""
        return plan.width

    def frontier(self, tree: TokenTree, terms: Terms) -> list[Node]:
        """The best k of the first level where they are not all expanded."""
        if not tree.root.expanded:
            return [tree.root][: terms.plan.depth]
        for depth, level in enumerate(tree.levels(), 1):
            if depth >= terms.plan.depth:
                break
            best = sorted(level, key=_score, reverse=True)[: terms.limit]
            if waiting := [node for node in best if not node.expanded]:
                return waiting
        return []

    def propose(self, tree: TokenTree, node: Node, scored: Sequence[tuple[int, float]], terms: Terms) -> list[Node]:
        """Adds the best candidates and tells none of them."""
        node.expanded = True
        for token, edge in scored[: terms.plan.width]:
            if math.isfinite(edge):
                tree.add(node, token, edge)
        return []

    def rest(self, tree: TokenTree, terms: Terms) -> list[Node]:
        """Of the best n of all, those that were not told yet."""
        plan = terms.plan
        best = islice(tree.best_first(depth=plan.depth, width=plan.width), plan.nodes)
        return [node for score, node in best if not node.names and score >= terms.price]


def _score(node: Node) -> float:
    return node.log_score
