"""A tree whose nodes are drawn from q, in a shape that was fixed before, for rules that hold p against q."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from drafter_svc.replica import Snapshot
from drafter_svc.session import DraftSession
from outrider.core.construction import Sequoia, Shaped
from outrider.core.digest import extend
from outrider.core.edges import edge_code, edge_from_code
from outrider.core.growth import Fits
from outrider.core.rules import DRAFT, SeededChance, SparseRow, rule_of
from outrider.core.shapes import Shape
from outrider.core.tree import Delta, Node
from outrider.engine.logits import Row


class DrawnSession(DraftSession):
    """Draws level by level; a level goes up whole. Nothing that was drawn decides what is drawn or sent beside it, and
    nothing outlives a commit: both would bias the text (DESIGN: rules for the p/q family on a streamed tree)."""

    def __init__(
        self,
        snapshot: Snapshot,
        slot: int,
        vocabulary: int,
        construction: Shaped | None = None,
        *,
        first_id: int = 1,
        cached: int = 0,
    ) -> None:
        """`construction`: None is the default, Sequoia's."""
        self._shaped = construction or Sequoia()
        super().__init__(snapshot, slot, vocabulary, self._shaped, first_id=first_id, cached=cached)
        self._epoch = snapshot.epoch
        self._chain_only = rule_of(snapshot.contract).chain
        self._edges: list[float] = []  # of this root's shape, by rank
        self._rates: list[float] = []  # the chances that they stand for
        self._shapes: dict[Node, Shape] = {}  # of what is to be drawn below each node
        self._lessons: list[tuple[int, int | None]] = []  # of each reached node: children, and which was accepted

    def forget(self) -> bool:
        """Waits for the next commit: what was drawn stays as it is, and nothing may be drawn beside it."""
        super().forget()
        for node in [self.tree.root, *(node for level in self.tree.levels() for node in level)]:
            node.expanded = False
        self._shapes = dict.fromkeys([self.tree.root, *self._shapes], ())
        return True

    def frontier(self, fits: Fits, limit: int) -> list[Node]:
        """The next level, if there is room for all of it."""
        root = self.tree.root
        if root not in self._shapes:
            plan = replace(self.plan, width=1) if self._chain_only and self.plan.width else self.plan
            width = self._shaped.width(plan)
            rates = fits.ranks.rates(width)
            self._edges = [edge_from_code(edge_code(math.log(rate))) for rate in rates]  # as the wire can carry them
            self._rates = [math.exp(edge) for edge in self._edges]
            self._shapes = {root: self._shaped.shape(self._terms(self._rates, limit)._replace(plan=plan))}
        level = [node for node, below in self._shapes.items() if below and not node.expanded]
        return level if len(level) <= limit else []

    def gain(self, fits: Fits, nodes: Sequence[Node]) -> float:
        """By the rates alone."""
        return sum(
            self.tree.score(node) * rate - self.price
            for node in nodes
            for rate, _ in zip(self._rates, self._shapes[node], strict=False)
        )

    def expand(self, nodes: Sequence[Node], rows: Sequence[Row], fits: Fits) -> Delta:
        """Draws the children of each node, by chance that nothing else has."""
        added: list[Node] = []
        for node, row in zip(nodes, rows, strict=True):
            node.expanded = True
            path = self.tree.path(node)
            node.q = SparseRow.of(self.sampler.probabilities(row.logits[: self.usable], path))
            place = extend(self.tree.digest, path)
            chance = SeededChance(self.contract.seed, self.contract.choice, self._epoch, place, DRAFT)
            below = self._shapes[node]
            for token, edge, shape in zip(node.q.draw(len(below), chance), self._edges, below, strict=False):
                child = self.tree.add(node, token, edge)
                self._shapes[child] = shape
                added.append(child)
        return self.announce(added)

    def refill(self, fits: Fits) -> Delta:
        """Nothing: what was not drawn yet takes a pass."""
        return self.announce(())

    def rest(self, fits: Fits) -> Delta:
        """Nothing: a level goes up whole."""
        return self.announce(())

    def learn(self, fits: Fits) -> None:
        """What became of the children of each rank."""
        for offered, accepted in self._lessons:
            fits.ranks.observe(offered, accepted)
        self._lessons.clear()

    def _re_root(self, tokens: Sequence[int]) -> list[Node]:
        node: Node | None = self.tree.root
        for token in tokens:
            if node is None or not node.children:
                break
            drawn = list(node.children)
            self._lessons.append((len(drawn), drawn.index(token) if token in drawn else None))
            node = node.children.get(token)
        matched = self.tree.commit(tokens)
        self.tree.root.expanded = False  # what is drawn below it must be drawn afresh, so its row is wanted again
        self._shapes.clear()
        return matched
