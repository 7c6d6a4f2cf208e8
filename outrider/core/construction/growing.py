"""A whole tree at once, grown in rounds: for measurements and proofs, where nobody commits meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from outrider.core.construction.construction import Construction, Terms
from outrider.core.tree import Node, TokenTree

SENDER = 0  # under whose name what is told is known

Scored = Sequence[tuple[int, float]]  # a node's candidates and the logarithms of their chances, best first


def grow(
    tree: TokenTree, construction: Construction, terms: Terms, score: Callable[[Sequence[Node]], Sequence[Scored]]
) -> list[Node]:
    """Grows `tree` until it is complete; `score` judges the nodes of one pass, one list for each.

    Returns what a step would verify: of the told nodes the best `plan.nodes` by path score, parents before children.
    """
    while nodes := construction.frontier(tree, terms):
        for node, scored in zip(nodes, score(nodes), strict=True):
            if tree.holds(node):
                _tell(tree, construction.propose(tree, node, scored[: construction.width(terms.plan)], terms))
    _tell(tree, construction.rest(tree, terms))
    told = (node for _, node in tree.best_first(depth=terms.plan.depth, width=terms.plan.width) if node.names)
    return list(islice(told, terms.plan.nodes))


def _tell(tree: TokenTree, nodes: Sequence[Node]) -> None:
    for node in nodes:
        tree.name(node, SENDER, tree.last_id(SENDER) + 1)
