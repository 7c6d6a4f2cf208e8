"""Trees whose shape is fixed before anything is drawn: for rules that must not choose by what was drawn."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

Shape = tuple["Shape", ...]  # a node's children, first drawn first

MEMORY = 0.98  # weight of the past at each observation
FIRST_RATES = (0.7, 0.15, 0.06, 0.03)  # before anything was seen
LEAST = 1e-6  # that a rate falls to
PRIOR = 8.0  # observations' worth of them


class RankRates:
    """How often a node's child is the one that is accepted, by the order in which it was drawn."""

    def __init__(self) -> None:
        self._hits: list[float] = []
        self._seen: list[float] = []

    def observe(self, offered: int, accepted: int | None) -> None:
        """Of a node that was reached, that many children were verified, and this one was accepted, or none."""
        self._know(offered)
        for rank in range(offered):
            self._seen[rank] = MEMORY * self._seen[rank] + 1.0
            self._hits[rank] = MEMORY * self._hits[rank] + (rank == accepted)

    def rates(self, width: int) -> list[float]:
        """For each of so many ranks, the chance; a later one's is never the larger."""
        self._know(width)
        rates: list[float] = []
        for hits, seen in zip(self._hits[:width], self._seen[:width], strict=True):
            rates.append(min(max(hits / seen, LEAST), rates[-1] if rates else 1.0))
        return rates

    def _know(self, ranks: int) -> None:
        while len(self._seen) < ranks:
            rank = len(self._seen)
            last = len(FIRST_RATES) - 1
            self._hits.append(PRIOR * FIRST_RATES[min(rank, last)] * 0.5 ** max(0, rank - last))
            self._seen.append(PRIOR)


def best_shape(rates: Sequence[float], *, nodes: int, depth: int, least: float = 0.0, expanded: int = 2**31) -> Shape:
    """The shape with the largest sum of path products, a node's factor being the rate of its rank.

    At most `nodes` nodes, `depth` deep, `expanded` of which have children at any one depth; no node whose product is
    below `least`. It is what the dynamic programme of Sequoia (Chen et al., arXiv 2402.12374, section 4.1) finds: a
    product only falls along a path and over the ranks, so the best nodes, taken one by one, are the best tree of their
    number.
    """
    root = _Growing()
    heap: list[tuple[float, int, _Growing, int, int]] = []  # (-product, order, parent, rank, depth)
    parents = [0] * (depth + 1)  # at each depth
    order = 0

    def offer(parent: _Growing, product: float, rank: int, at: int) -> None:
        nonlocal order
        if rank < len(rates) and at <= depth and product * rates[rank] >= max(least, 1e-9):
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
        child = _Growing()
        parent.children.append(child)
        offer(parent, -negative / rates[rank], rank + 1, at)
        offer(child, -negative, 0, at + 1)
    return root.shape()


def chain_shape(depth: int) -> Shape:
    """A path of so many nodes."""
    shape: Shape = ()
    for _ in range(depth):
        shape = (shape,)
    return shape


def k_ary_shape(k: int, *, nodes: int, depth: int, expanded: int = 2**31) -> Shape:
    """Every node with k children, level by level, while there are nodes left; `expanded` of a level get children."""
    root = _Growing()
    level = [root]
    for _ in range(depth):
        for parent in level[:expanded]:
            parent.children = [_Growing() for _ in range(min(k, nodes))]
            nodes -= len(parent.children)
        level = [child for parent in level for child in parent.children]
    return root.shape()


def expected_tokens(shape: Shape, rates: Sequence[float]) -> float:
    """The sum of path products: how many tokens are expected to be accepted, without the one that always is."""
    return sum(rate * (1.0 + expected_tokens(below, rates)) for rate, below in zip(rates, shape, strict=False))


def size_of(shape: Shape) -> int:
    """How many nodes it has."""
    return sum(1 + size_of(below) for below in shape)


def depth_of(shape: Shape) -> int:
    """Nodes on its longest path."""
    return max((1 + depth_of(below) for below in shape), default=0)


def priced_shape(
    rates: Sequence[float],
    worth: Callable[[float, int, int], float],
    *,
    nodes: int,
    depth: int,
    least: float = 0.0,
    expanded: int = 2**31,
) -> Shape:
    """The best shape of the depth that is worth most, by (expected tokens, nodes, levels) of each depth's best shape;
    the shallowest of several. Bounds as in `best_shape`."""
    best: Shape = ()
    most = worth(0.0, 0, 0)
    for levels in range(1, depth + 1):
        shape = best_shape(rates, nodes=nodes, depth=levels, least=least, expanded=expanded)
        if depth_of(shape) < levels:
            break
        value = worth(expected_tokens(shape, rates), size_of(shape), levels)
        if value > most:
            best, most = shape, value
    return best


class _Growing:
    def __init__(self) -> None:
        self.children: list[_Growing] = []

    def shape(self) -> Shape:
        return tuple(child.shape() for child in self.children)
