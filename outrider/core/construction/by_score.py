"""Constructions that choose nodes by their path scores.

They are not lossless under a rule that compares p with q, because whether a node exists would depend on the draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from outrider.core.construction.construction import Construction, TreeTerms
from outrider.core.construction.expansion import floor_score, frontier, propose
from outrider.core.session.contract import Plan
from outrider.core.tree.node import Node
from outrider.core.tree.token_tree import TokenTree


class BestFirst(Construction):
    """Expands the best unexpanded nodes of the whole tree, up to what a step can hold, and sends new nodes at once.

    The default construction; see `outrider.core.construction.expansion`.
    """

    name = "best-first"
    guesses = True

    def frontier(self, tree: TokenTree, terms: TreeTerms) -> list[Node]:
        """Return the best unexpanded nodes by path score, across levels."""
        return frontier(tree, terms.plan, terms.min_path_score, terms.limit, ahead=terms.ahead)

    def propose(self, tree: TokenTree, node: Node, scored: Sequence[tuple[int, float]], terms: TreeTerms) -> list[Node]:
        """Add, and return for sending, the candidates whose path score is high enough to draft."""
        return propose(tree, node, scored, floor_score(terms.min_path_score, ahead=terms.ahead))


class OptTree(BestFirst):
    """Expands level by level: a level's nodes are expanded if they are among the tree's best n, and growth stops when
    the deepest level has added no more than a threshold to the sum of path scores of those best n.

    Source: OPT-Tree (Wang et al., arXiv 2406.17276), algorithm 1. The best n nodes maximise the sum, which is the
    expected number of accepted tokens, among all trees of n nodes (theorem 3.2).
    """

    name = "opt-tree"
    guesses = False

    def __init__(self, threshold: float = 0.05) -> None:
        """`threshold` is the expected number of tokens that a level must add: delta in the paper."""
        self._threshold = threshold

    def frontier(self, tree: TokenTree, terms: TreeTerms) -> list[Node]:
        """Return the unexpanded nodes of the shallowest level that has some among the best n, best first."""
        plan = terms.plan
        if not tree.root.expanded or not plan.depth:
            return [tree.root][: plan.depth]
        best = list(islice(tree.best_first(depth=plan.depth, width=plan.width), plan.nodes))
        waiting = [node for _, node in best if not node.expanded and tree.depth(node) < plan.depth]
        if not waiting:
            return []
        deepest = max(tree.depth(node) for _, node in best)
        level = min(map(tree.depth, waiting))
        if level == deepest and self._added(tree, plan, best) <= max(self._threshold, terms.level_cost_tokens):
            return []
        return [node for node in waiting if tree.depth(node) == level][: terms.limit]

    def _added(self, tree: TokenTree, plan: Plan, best: Sequence[tuple[float, Node]]) -> float:
        """Return what the deepest level has added to the sum of path scores over the best n."""
        deepest = max(tree.depth(node) for _, node in best)
        before = islice(tree.best_first(depth=deepest - 1, width=plan.width), plan.nodes)
        return sum(score for score, _ in best) - sum(score for score, _ in before)


class Eagle2(Construction):
    """Expands the best k nodes of each level, down to the plan's depth; then sends the best n of all drafted nodes, and
    none before.

    Source: EAGLE-2 (Li et al., arXiv 2406.16858), sections 4.1 and 4.2. The paper's k is two numbers here: how many
    nodes a pass expands, and how many children each node gets.
    """

    name = "eagle-2"

    def frontier(self, tree: TokenTree, terms: TreeTerms) -> list[Node]:
        """Return the unexpanded ones of the best k nodes of the first level that has any."""
        if not tree.root.expanded:
            return [tree.root][: terms.plan.depth]
        for depth, level in enumerate(tree.levels(), 1):
            if depth >= terms.plan.depth:
                break
            best = sorted(level, key=_score, reverse=True)[: terms.limit]
            if waiting := [node for node in best if not node.expanded]:
                return waiting
        return []

    def propose(self, tree: TokenTree, node: Node, scored: Sequence[tuple[int, float]], terms: TreeTerms) -> list[Node]:
        """Add the best candidates and return none for sending."""
        node.expanded = True
        for token, edge in scored[: terms.plan.width]:
            if math.isfinite(edge):
                tree.add(node, token, edge)
        return []

    def flush(self, tree: TokenTree, terms: TreeTerms) -> list[Node]:
        """Return those of the best n nodes that were not sent yet and reach `min_path_score`."""
        plan = terms.plan
        best = islice(tree.best_first(depth=plan.depth, width=plan.width), plan.nodes)
        return [node for score, node in best if not node.names and score >= terms.min_path_score]


def _score(node: Node) -> float:
    return node.log_score
