"""Constructions whose shape is known before anything is drafted: the only ones for rules that hold p against q."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from outrider.core.construction.construction import Terms
from outrider.core.contract import Plan
from outrider.core.shapes import Shape, best_shape, chain_shape, k_ary_shape, priced_shape
from outrider.core.tree import Node, TokenTree


class Shaped(ABC):
    """A node's children follow from the ranks along its path alone; it gets its best candidates, as many as the shape
    says there."""

    name: str
    guesses = False

    @abstractmethod
    def shape(self, terms: Terms) -> Shape:
        """The tree of at most `plan.nodes` nodes, `plan.depth` deep, at most `limit` of which have children at any one
        depth."""

    def width(self, plan: Plan) -> int:
        """The plan's."""
        return plan.width

    def frontier(self, tree: TokenTree, terms: Terms) -> list[Node]:
        """The unexpanded nodes of the shallowest level that has some with children in the shape."""
        for level in self._levels(tree, terms):
            if waiting := [node for node, below in level if below and not node.expanded]:
                return waiting[: terms.limit]
        return []

    def propose(self, tree: TokenTree, node: Node, scored: Sequence[tuple[int, float]], terms: Terms) -> list[Node]:
        """Adds and tells the children that the shape has there and the tree has not."""
        node.expanded = True
        wanted = next((len(below) for level in self._levels(tree, terms) for at, below in level if at is node), 0)
        new = [(token, edge) for token, edge in scored[:wanted] if token not in node.children]
        return [tree.add(node, token, edge) for token, edge in new[: max(0, wanted - len(node.children))]]

    def rest(self, tree: TokenTree, terms: Terms) -> list[Node]:
        """Nothing."""
        return []

    def _levels(self, tree: TokenTree, terms: Terms) -> Iterator[list[tuple[Node, Shape]]]:
        """The tree's nodes that are in the shape, from the root down, each with the shape below it."""
        level = [(tree.root, self.shape(terms))]
        while level:
            yield level
            level = [
                found for node, below in level for found in zip(node.children.values(), below, strict=False)
            ]  # children are in the order of their ranks


class Chain(Shaped):
    """One path."""

    name = "chain"

    def width(self, plan: Plan) -> int:
        """One."""
        return min(1, plan.width)

    def shape(self, terms: Terms) -> Shape:
        """As deep as the plan allows."""
        return chain_shape(min(terms.plan.depth, terms.plan.nodes) if terms.plan.width and terms.limit else 0)


class KAry(Shaped):
    """Every node has k children, the plan's width, until the nodes are used up, level by level.

    Source: SpecInfer (Miao et al., arXiv 2305.09781), section 3, with the same expansion at every level.
    """

    name = "k-ary"

    def shape(self, terms: Terms) -> Shape:
        """A level's nodes are filled in order of their ranks; the last level may be incomplete."""
        plan = terms.plan
        return k_ary_shape(plan.width, nodes=plan.nodes, depth=plan.depth, expanded=terms.limit)


class Sequoia(Shaped):
    """The shape with the largest sum of path products by the measured acceptance of each rank, its depth chosen by what
    a level costs.

    Source: Sequoia (Chen et al., arXiv 2402.12374), sections 4.1 and 4.3.
    """

    name = "sequoia"

    def shape(self, terms: Terms) -> Shape:
        """The best of its size; where a level has a price, also of its depth."""
        plan, rates = terms.plan, terms.rates[: terms.plan.width]
        if not terms.level_price:
            return best_shape(rates, nodes=plan.nodes, depth=plan.depth, least=terms.price, expanded=terms.limit)
        return priced_shape(
            rates,
            lambda expected, nodes, levels: expected - levels * terms.level_price,
            nodes=plan.nodes,
            depth=plan.depth,
            least=terms.price,
            expanded=terms.limit,
        )
