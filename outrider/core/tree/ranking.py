"""The order in which a step takes a tree's nodes: best path score first."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import islice

from outrider.core.tree.node import Node


def best_first(root: Node, *, depth: int, width: int) -> Iterator[tuple[float, Node]]:
    """Yield path scores and nodes below `root`, best first, hence parents before children.

    Only the `width` best children of a node and nodes at most `depth` levels below the root are yielded.

    Source: OPT-Tree (Wang et al., arXiv 2406.17276), section 3: any prefix of this order maximises the sum of path
    scores, which is the expected number of accepted tokens, among all trees of its size.
    """
    last = root.position + depth
    origin = root.log_score
    order = 0
    heap: list[tuple[float, int, Node]] = []

    def push(parent: Node) -> None:
        nonlocal order
        if parent.position >= last or not parent.children:
            return
        children = list(parent.children.values())
        if len(children) > width:
            children = heapq.nlargest(width, children, key=lambda child: child.edge)
        for child in children:
            order += 1
            heapq.heappush(heap, (origin - child.log_score, order, child))

    push(root)
    while heap:
        cost, _, node = heapq.heappop(heap)
        yield math.exp(-cost), node
        push(node)


class Ranking:
    """The best nodes below a root, found as far as they were asked for. It is of a tree that does not change."""

    def __init__(self, root: Node, *, depth: int, width: int) -> None:
        self.depth = depth
        self.width = width
        self._found: list[tuple[float, Node]] = []
        self._rest = best_first(root, depth=depth, width=width)

    def first(self, count: int) -> list[tuple[float, Node]]:
        """Return path scores and nodes, at most `count`, best first."""
        self._found.extend(islice(self._rest, max(0, count - len(self._found))))
        return self._found[:count]
