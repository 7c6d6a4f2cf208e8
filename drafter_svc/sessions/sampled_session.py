"""A tree whose nodes are drawn from q, in a shape that is fixed before, for rules that compare p and q."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from drafter_svc.sessions.session import DrafterSession
from outrider.core.acceptance import DRAFT, SeededRandom, SparseRow, rule_of
from outrider.core.construction import Sequoia, StaticConstruction
from outrider.core.construction.expansion import DrafterFits
from outrider.core.session.digest import extend
from outrider.core.session.snapshot import MirrorSnapshot
from outrider.core.tree.delta import Delta
from outrider.core.tree.node import Node
from outrider.core.tree.score_codec import edge_code, edge_from_code
from outrider.core.tree.static_trees import Shape
from outrider.engine.interface.logits import LogitsRow


class SampledSession(DrafterSession):
    """Draws level by level; a level takes a pass, and is sent complete. No drawn node decides what is drawn or sent
    beside it, and none survives a commit: both would bias the text (docs/protocol.md, section 12).
    """

    def __init__(
        self,
        snapshot: MirrorSnapshot,
        slot: int,
        vocabulary: int,
        construction: StaticConstruction | None = None,
        *,
        first_id: int = 1,
        cached: int = 0,
    ) -> None:
        """`construction`: None is the default, Sequoia's."""
        self._static_construction = construction or Sequoia()
        super().__init__(snapshot, slot, vocabulary, self._static_construction, first_id=first_id, cached=cached)
        self._epoch = snapshot.epoch
        self._chain_only = rule_of(snapshot.contract).chain
        self._edges: list[float] = []  # edge scores of this root's shape, by rank
        self._rates: list[float] = []  # the probabilities that `_edges` stand for
        self._shapes: dict[Node, Shape] = {}  # the shape to draw below each node
        self._observations: list[tuple[int, int | None]] = []  # reached nodes: children, index of the accepted

    def drop_kv(self) -> bool:
        """Drop all KV and wait for the next commit: drawn nodes stay, and nothing may be drawn beside them."""
        super().drop_kv()
        for node in self.tree.root.subtree():
            node.expanded = False
        self._shapes = dict.fromkeys([self.tree.root, *self._shapes], ())
        return True

    def frontier(self, fits: DrafterFits, limit: int) -> list[Node]:
        """Return the next level, if there is room for all of it."""
        root = self.tree.root
        if root not in self._shapes:
            plan = replace(self.plan, width=1) if self._chain_only and self.plan.width else self.plan
            width = self._static_construction.width(plan)
            rates = fits.ranks.rates(width)
            self._edges = [edge_from_code(edge_code(math.log(rate))) for rate in rates]  # rounded as on the wire
            self._rates = [math.exp(edge) for edge in self._edges]
            self._shapes = {root: self._static_construction.shape(self._terms(self._rates, limit)._replace(plan=plan))}
        level = [node for node, below in self._shapes.items() if below and not node.expanded]
        return level if len(level) <= limit else []

    def gain(self, fits: DrafterFits, nodes: Sequence[Node]) -> float:
        """Return the expected gain by the measured acceptance rates alone."""
        return sum(
            self.tree.score(node) * rate - self.terms.min_path_score
            for node in nodes
            for rate, _ in zip(self._rates, self._shapes[node], strict=False)
        )

    def expand(self, nodes: Sequence[Node], rows: Sequence[LogitsRow], fits: DrafterFits) -> Delta:
        """Draws the children of each node from a random source that no other draw uses."""
        added: list[Node] = []
        for node, row in zip(nodes, rows, strict=True):
            node.expanded = True
            path = self.tree.path(node)
            node.q = SparseRow.of(self.sampler.probabilities(row.logits[: self.usable], path))
            path_digest = extend(self.tree.digest, path)
            chance = SeededRandom(self.contract.seed, self.contract.choice, self._epoch, path_digest, DRAFT)
            below = self._shapes[node]
            for token, edge, shape in zip(node.q.draw(len(below), chance), self._edges, below, strict=False):
                child = self.tree.add(node, token, edge)
                self._shapes[child] = shape
                added.append(child)
        return self.announce(added)

    def learn(self, fits: DrafterFits) -> None:
        """Learns the acceptance rate of each rank."""
        for offered, accepted in self._observations:
            fits.ranks.observe(offered, accepted)
        self._observations.clear()

    def _re_root(self, tokens: Sequence[int]) -> list[Node]:
        node: Node | None = self.tree.root
        for token in tokens:
            if node is None or not node.children:
                break
            drawn = list(node.children)
            self._observations.append((len(drawn), drawn.index(token) if token in drawn else None))
            node = node.children.get(token)
        matched = self.tree.commit(tokens)
        self.tree.root.expanded = False  # its children must be drawn anew, which needs its row again
        self._shapes.clear()
        return matched
