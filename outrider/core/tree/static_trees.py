"""Tree shapes that are fixed before anything is drawn, for rules under which the shape must not depend on the draws."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from outrider.core.stats import FadingRatio

Shape = tuple["Shape", ...]  # the shapes below a node's children, in the order in which the children are drawn

FIRST_RATES = (0.7, 0.15, 0.06, 0.03)  # acceptance rates by rank before the first observation
MIN_RATE = 1e-6  # lower bound of a rate
PRIOR = 8.0  # observations that FIRST_RATES count as


class RankRates:
    """Estimates how often each child of a node is the accepted one, by the order in which the children were drawn."""

    def __init__(self) -> None:
        self._rates: list[FadingRatio] = []

    def observe(self, offered: int, accepted: int | None) -> None:
        """Record one reached node: `offered` of its children were verified, and the child of rank `accepted`, or none,
        was accepted."""
        self._extend_to(offered)
        for rank in range(offered):
            self._rates[rank].observe(rank == accepted)

    def rates(self, width: int) -> list[float]:
        """Return the acceptance rate of each of the first `width` ranks, never rising: [width]."""
        self._extend_to(width)
        rates: list[float] = []
        for rate in self._rates[:width]:
            rates.append(min(max(rate.ratio, MIN_RATE), rates[-1] if rates else 1.0))
        return rates

    def _extend_to(self, ranks: int) -> None:
        last = len(FIRST_RATES) - 1
        for rank in range(len(self._rates), ranks):
            hits = PRIOR * FIRST_RATES[min(rank, last)] * 0.5 ** max(0, rank - last)
            self._rates.append(FadingRatio(hits=hits, attempts=PRIOR))


def best_shape(
    rates: Sequence[float], *, nodes: int, depth: int, min_product: float = 0.0, expanded: int = 2**31
) -> Shape:
    """Return the shape with the largest sum of path products, where a node's factor is the rate of its rank.

    The shape has at most `nodes` nodes and is at most `depth` deep; at any depth at most `expanded` nodes have
    children; no node's product is below `min_product`. The result is the one of Sequoia's dynamic programme (Chen et
    al., arXiv 2402.12374, section 4.1): a product only falls along a path and over the ranks, so the best nodes, taken
    one by one, form the best tree of their number.
    """
    root = _MutableNode()
    heap: list[tuple[float, int, _MutableNode, int, int]] = []  # (-product, order, parent, rank, depth)
    parents = [0] * (depth + 1)  # nodes with children, at each depth
    order = 0

    def offer(parent: _MutableNode, product: float, rank: int, at: int) -> None:
        nonlocal order
        if rank < len(rates) and at <= depth and product * rates[rank] >= max(min_product, 1e-9):
            order += 1
            heapq.heappush(heap, (-product * rates[rank], order, parent, rank, at))

    offer(root, 1.0, 0, 1)
    while heap and nodes:
        negative, _, parent, rank, at = heapq.heappop(heap)
        if rank == 0:
            if parents[at - 1] == expanded:
                continue
            parents[at - 1] += 1
        nodes -= 1
        child = _MutableNode()
        parent.children.append(child)
        offer(parent, -negative / rates[rank], rank + 1, at)
        offer(child, -negative, 0, at + 1)
    return root.shape()


def chain_shape(depth: int) -> Shape:
    """Return the shape of a single path of `depth` nodes."""
    shape: Shape = ()
    for _ in range(depth):
        shape = (shape,)
    return shape


def k_ary_shape(k: int, *, nodes: int, depth: int, expanded: int = 2**31) -> Shape:
    """Return the shape in which every node has k children, filled level by level up to `nodes` nodes. The first
    `expanded` nodes of a level get children."""
    root = _MutableNode()
    level = [root]
    for _ in range(depth):
        for parent in level[:expanded]:
            parent.children = [_MutableNode() for _ in range(min(k, nodes))]
            nodes -= len(parent.children)
        level = [child for parent in level for child in parent.children]
    return root.shape()


def expected_tokens(shape: Shape, rates: Sequence[float]) -> float:
    """Return the sum of path products: the expected number of accepted tokens, without the bonus token."""
    return sum(rate * (1.0 + expected_tokens(below, rates)) for rate, below in zip(rates, shape, strict=False))


def size_of(shape: Shape) -> int:
    """Return the number of nodes of a shape."""
    return sum(1 + size_of(below) for below in shape)


def depth_of(shape: Shape) -> int:
    """Return the number of nodes on the longest path of a shape."""
    return max((1 + depth_of(below) for below in shape), default=0)


def shape_by_objective(
    rates: Sequence[float],
    objective: Callable[[float, int, int], float],
    *,
    nodes: int,
    depth: int,
    min_product: float = 0.0,
    expanded: int = 2**31,
) -> Shape:
    """Return, among the best shapes of every depth, the one that maximises `objective`; the shallowest one on a tie.

    `objective` takes (expected tokens, nodes, levels). The bounds are those of `best_shape`.
    """
    best: Shape = ()
    best_value = objective(0.0, 0, 0)
    for levels in range(1, depth + 1):
        shape = best_shape(rates, nodes=nodes, depth=levels, min_product=min_product, expanded=expanded)
        if depth_of(shape) < levels:
            break
        value = objective(expected_tokens(shape, rates), size_of(shape), levels)
        if value > best_value:
            best, best_value = shape, value
    return best


class _MutableNode:
    def __init__(self) -> None:
        self.children: list[_MutableNode] = []

    def shape(self) -> Shape:
        return tuple(child.shape() for child in self.children)
