"""Constructions whose shape is fixed before anything is drafted: the only ones for rules that compare p with q."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from outrider.core.construction.construction import Construction, TreeTerms
from outrider.core.session.contract import Plan
from outrider.core.tree.node import Node
from outrider.core.tree.static_trees import Shape, best_shape, chain_shape, k_ary_shape, shape_by_objective
from outrider.core.tree.token_tree import TokenTree


class StaticConstruction(Construction, ABC):
    """A construction with a fixed shape: the number of a node's children depends only on the ranks along its path. A
    node's children are its best candidates."""

    @abstractmethod
    def shape(self, terms: TreeTerms) -> Shape:
        """Return a shape of at most `plan.nodes` nodes and depth `plan.depth`; at any depth at most `limit` nodes have
        children."""

    def frontier(self, tree: TokenTree, terms: TreeTerms) -> list[Node]:
        """Return the unexpanded nodes of the shallowest level that has some with children in the shape."""
        for level in self._levels(tree, terms):
            if waiting := [node for node, below in level if below and not node.expanded]:
                return waiting[: terms.limit]
        return []

    def propose(self, tree: TokenTree, node: Node, scored: Sequence[tuple[int, float]], terms: TreeTerms) -> list[Node]:
        """Add, and return for sending, the children that the shape has there and the tree lacks."""
        node.expanded = True
        wanted = next((len(below) for level in self._levels(tree, terms) for at, below in level if at is node), 0)
        new = [(token, edge) for token, edge in scored[:wanted] if token not in node.children]
        return [tree.add(node, token, edge) for token, edge in new[: max(0, wanted - len(node.children))]]

    def _levels(self, tree: TokenTree, terms: TreeTerms) -> Iterator[list[tuple[Node, Shape]]]:
        """Yield the tree's nodes that are in the shape, level by level from the root, each with the shape below it."""
        level = [(tree.root, self.shape(terms))]
        while level:
            yield level
            level = [
                found for node, below in level for found in zip(node.children.values(), below, strict=False)
            ]  # children stand in the order of their ranks


class Chain(StaticConstruction):
    """A single path."""

    name = "chain"

    def width(self, plan: Plan) -> int:
        """Return 1, or 0 where the plan's width is 0."""
        return min(1, plan.width)

    def shape(self, terms: TreeTerms) -> Shape:
        """Return a path as deep as the plan allows."""
        return chain_shape(min(terms.plan.depth, terms.plan.nodes) if terms.plan.width and terms.limit else 0)


class KAry(StaticConstruction):
    """Every node has k children, the plan's width, level by level until the plan's nodes are used up.

    Source: SpecInfer (Miao et al., arXiv 2305.09781), section 3, with the same expansion at every level.
    """

    name = "k-ary"

    def shape(self, terms: TreeTerms) -> Shape:
        """Return the shape, filled level by level in the order of ranks; the last level may be incomplete."""
        plan = terms.plan
        return k_ary_shape(plan.width, nodes=plan.nodes, depth=plan.depth, expanded=terms.limit)


class Sequoia(StaticConstruction):
    """The shape with the largest sum of path products by the measured acceptance of each rank. Its depth follows from
    the cost of a level.

    Source: Sequoia (Chen et al., arXiv 2402.12374), sections 4.1 and 4.3.
    """

    name = "sequoia"

    def shape(self, terms: TreeTerms) -> Shape:
        """Return the best shape for the plan; where a level costs time, the depth is chosen with that cost."""
        plan, rates = terms.plan, terms.rates[: terms.plan.width]
        if not terms.level_cost_tokens:
            least, limit = terms.min_path_score, terms.limit
            return best_shape(rates, nodes=plan.nodes, depth=plan.depth, min_product=least, expanded=limit)
        return shape_by_objective(
            rates,
            lambda expected, nodes, levels: expected - levels * terms.level_cost_tokens,
            nodes=plan.nodes,
            depth=plan.depth,
            min_product=terms.min_path_score,
            expanded=terms.limit,
        )
