"""The nodes that heads on the target draft for one session: anew after each step, from the target's hidden states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy

from outrider.core.acceptance import ChildSampling, rule_of
from outrider.core.construction.expansion import CANDIDATES, Candidates, DrafterFits, floor_score
from outrider.core.control.calibration import Calibration
from outrider.core.control.trial_gate import TrialGate
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract, Plan
from outrider.core.tree.node import Node
from outrider.core.tree.token_tree import TokenTree
from outrider.engine.heads.speculator import FloatRows, HeadNodes
from verifier_svc.proposers.ngram_proposer import prune

SENDER = -1  # the heads' key in the tree
LEVEL_NODES = 8  # nodes of a session that are expanded in one level
MAX_NODES = 64  # nodes that are expanded in a round


class HeadDrafts:
    """The heads' drafts for one session. A round is drafted below one root; when the target has chosen, its predictions
    are scored.
    """

    def __init__(
        self, contract: Contract, calibration: Calibration, fits: Sequence[DrafterFits], shared_gate: TrialGate
    ) -> None:
        """`fits`: one for each level; `shared_gate`: measures what rounds bring. Sessions with the same rule and
        temperature bucket share both.
        """
        self.calibration = calibration
        self.trial_gate = copy(shared_gate)
        self._shared_gate = shared_gate
        self.price = 0.0  # tokens that could be committed in the time of the round
        self._shared = rule_of(contract).child_sampling is ChildSampling.FREELY
        self._fits = fits
        self._rows: dict[Node, tuple[int, Candidates]] = {}  # of expanded nodes: row number, candidates
        self._last_id = 0

    def begin(self, tree: TokenTree) -> None:
        """Begins a round: removes the last round's nodes, which were drafted from guessed features."""
        self._rows.clear()
        prune(tree, tree.root, SENDER)

    def propose(
        self, tree: TokenTree, sampler: Sampler, node: Node, number: int, logits: FloatRows, plan: Plan, price: float
    ) -> None:
        """Adds a node's children from the logits row of that number, as far as they are worth verifying."""
        row = Candidates(*sampler.leading(logits, tree.path(node), CANDIDATES, noised=self._shared))
        self._rows[node] = number, row
        min_edge = floor_score(price) / tree.score(node)
        for token, claimed in self._fits[tree.depth(node)].edges(row, plan.width, None):
            edge = self.calibration.corrected(claimed)
            known = node.children.get(token)
            if math.exp(edge) < min_edge or (known is None and tree.size >= tree.capacity):
                continue
            child = tree.add(node, token, edge)
            if child.edge == edge:
                child.claim = SENDER, claimed
            if SENDER not in (sender for sender, _ in child.names):
                self._last_id += 1
                tree.ids.name(child, SENDER, self._last_id)

    def frontier(self, tree: TokenTree, plan: Plan, depth: int, price: float) -> list[Node]:
        """Return the nodes to expand next, best first, whoever drafted them; heads draft `depth` levels."""
        if len(self._rows) >= MAX_NODES:
            return []
        found: list[Node] = []
        for score, node in tree.best_first(depth=min(plan.depth, depth) - 1, width=plan.width):
            if score < floor_score(price) or len(found) == LEVEL_NODES:
                break
            if node.parent in self._rows and node not in self._rows:
                found.append(node)
        return found

    def speculator_node(self, node: Node) -> HeadNodes:
        """Return a node of the frontier as the speculator takes it."""
        assert node.parent is not None
        return HeadNodes(self._rows[node.parent][0], node.token)

    def gain(self, tree: TokenTree, nodes: Sequence[Node], width: int, price: float) -> float:
        """Return the tokens that expanding these nodes is expected to bring, less the cost of verifying children."""
        return sum(self._fits[tree.depth(node)].gain([tree.score(node)], width, price) for node in nodes)

    def settle(self, tree: TokenTree, path: Sequence[Node], tokens: Sequence[int]) -> None:
        """Learns from a step that accepts `path` and commits `tokens`. Called before the text goes on.

        A round's gain is the number of accepted nodes that the heads alone had drafted.
        """
        if not self._rows:
            for gate in (self.trial_gate, self._shared_gate):
                gate.observe_unused(len(tokens))
            return
        gain = sum(tree.ids.origins(node) == {SENDER} for node in path)
        for gate in (self.trial_gate, self._shared_gate):
            gate.observe(gain, self.price)
        node: Node | None = tree.root
        for token in tokens:
            if node is None or node not in self._rows:
                break
            self._fits[tree.depth(node)].observe(self._rows[node][1], token, None)
            node = node.children.get(token)
        self._rows.clear()
