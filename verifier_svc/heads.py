"""What heads on the target draft for one session: anew after each step, from the target's own hidden states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy

from outrider.core.calibration import Calibration
from outrider.core.contract import Contract, Plan
from outrider.core.growth import CANDIDATES, Candidates, Fits, floor_score
from outrider.core.rules import Drawn, rule_of
from outrider.core.sampler import Sampler
from outrider.core.tree import Node, TokenTree
from outrider.core.worth import Worth
from outrider.engine.heads.speculator import Drafted, FloatRows
from verifier_svc.own import prune

SENDER = -1  # their key in the tree
LEVEL_NODES = 8  # of a session that are expanded in a level
MOST_NODES = 64  # in a round


class HeadDrafts:
    """One session's. A round is drafted below one root; what it said is learned from when the target has spoken."""

    def __init__(self, contract: Contract, calibration: Calibration, fits: Sequence[Fits], usual: Worth) -> None:
        """`fits`: one for each level; `usual`: what rounds are worth. Sessions of one kind share both."""
        self.calibration = calibration
        self.worth = copy(usual)
        self._usual = usual
        self.price = 0.0  # tokens that could have been said in the time of the round
        self._shared = rule_of(contract).drawn is Drawn.FREELY
        self._fits = fits
        self._rows: dict[Node, tuple[int, Candidates]] = {}  # of expanded nodes: their rows' numbers, and what they say
        self._named = 0

    def begin(self, tree: TokenTree) -> None:
        """A round: what the last one said of nodes that are still there was said of guessed features."""
        self._rows.clear()
        prune(tree, tree.root, SENDER)

    def propose(
        self, tree: TokenTree, sampler: Sampler, node: Node, number: int, logits: FloatRows, plan: Plan, price: float
    ) -> None:
        """Adds the children of a node, by the row of that number, as far as they are worth verifying."""
        row = Candidates(*sampler.leading(logits, tree.path(node), CANDIDATES, noised=self._shared))
        self._rows[node] = number, row
        least = floor_score(price) / tree.score(node)
        for token, claimed in self._fits[tree.depth(node)].edges(row, plan.width, None):
            edge = self.calibration.corrected(claimed)
            known = node.children.get(token)
            if math.exp(edge) < least or (known is None and tree.size >= tree.capacity):
                continue
            child = tree.add(node, token, edge)
            if child.edge == edge:
                child.claim = SENDER, claimed
            if SENDER not in (sender for sender, _ in child.names):
                self._named += 1
                tree.name(child, SENDER, self._named)

    def frontier(self, tree: TokenTree, plan: Plan, depth: int, price: float) -> list[Node]:
        """What to expand next, best first, in a tree of which heads say `depth` levels; whoever drafted it."""
        if len(self._rows) >= MOST_NODES:
            return []
        found: list[Node] = []
        for score, node in tree.best_first(depth=min(plan.depth, depth) - 1, width=plan.width):
            if score < floor_score(price) or len(found) == LEVEL_NODES:
                break
            if node.parent in self._rows and node not in self._rows:
                found.append(node)
        return found

    def asked(self, node: Node) -> Drafted:
        """A node of the frontier, as the speculator knows it."""
        assert node.parent is not None
        return Drafted(self._rows[node.parent][0], node.token)

    def gain(self, tree: TokenTree, nodes: Sequence[Node], width: int, price: float) -> float:
        """Tokens that expanding these is expected to bring, less what verifying their children costs."""
        return sum(self._fits[tree.depth(node)].gain([tree.score(node)], width, price) for node in nodes)

    def settle(self, tree: TokenTree, path: Sequence[Node], tokens: Sequence[int]) -> None:
        """A step accepts `path` and says `tokens`. Comes before the text goes on.

        What the round brought is what it alone had drafted of the path.
        """
        if not self._rows:
            for worth in (self.worth, self._usual):
                worth.rest(len(tokens))
            return
        gain = sum(tree.origins(node) == {SENDER} for node in path)
        for worth in (self.worth, self._usual):
            worth.observe(gain, self.price)
        node: Node | None = tree.root
        for token in tokens:
            if node is None or node not in self._rows:
                break
            self._fits[tree.depth(node)].observe(self._rows[node][1], token, None)
            node = node.children.get(token)
        self._rows.clear()
