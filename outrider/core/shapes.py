"""Trees whose shape is fixed before anything is drawn: for rules that must not choose by what was drawn."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

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


class _Growing:
    def __init__(self) -> None:
        self.children: list[_Growing] = []

    def shape(self) -> Shape:
        return tuple(child.shape() for child in self.children)
