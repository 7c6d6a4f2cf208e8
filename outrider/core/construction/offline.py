"""Growth of a complete tree without commits in between, for measurements and tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from outrider.core.construction.construction import Construction, TreeTerms
from outrider.core.tree.node import Node
from outrider.core.tree.token_tree import TokenTree

SENDER = 0  # the sender under which the tree records sent nodes

Scored = Sequence[tuple[int, float]]  # a node's candidates and the logarithms of their probabilities, best first


def grow(
    tree: TokenTree, construction: Construction, terms: TreeTerms, score: Callable[[Sequence[Node]], Sequence[Scored]]
) -> list[Node]:
    """Grow `tree` until it is complete. `score` returns the scored candidates of each node of a pass.

    Return the nodes that a step would verify: the best `plan.nodes` of the sent nodes by path score, parents before
    children.
    """
    while nodes := construction.frontier(tree, terms):
        for node, scored in zip(nodes, score(nodes), strict=True):
            if tree.holds(node):
                mark_sent(tree, construction.propose(tree, node, scored[: construction.width(terms.plan)], terms))
    mark_sent(tree, construction.flush(tree, terms))
    sent = (node for _, node in tree.best_first(depth=terms.plan.depth, width=terms.plan.width) if node.names)
    return list(islice(sent, terms.plan.nodes))


def mark_sent(tree: TokenTree, nodes: Sequence[Node]) -> None:
    """Record nodes as sent under SENDER."""
    for node in nodes:
        tree.ids.name(node, SENDER, tree.ids.of(SENDER).last_id + 1)
