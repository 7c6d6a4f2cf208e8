"""The nodes that heads on the target draft for one session: anew after each step, from the target's hidden states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from typing import NamedTuple

import numpy as np

from outrider.core.acceptance import ChildSampling, rule_of
from outrider.core.construction.expansion import Candidates, DrafterFits, floor_score
from outrider.core.control.cost.calibration import Calibration
from outrider.core.control.trial_gate import TrialGate
from outrider.core.sampling.grammar import GrammarDelayed
from outrider.core.sampling.noise import Draw
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract, Plan
from outrider.core.tree.node import Node
from outrider.core.tree.token_tree import TokenTree
from outrider.engine.growth import CHILDREN, GrownLevel, Growth
from outrider.engine.heads.speculator import HeadNodes
from outrider.engine.interface.candidates import known_candidates, row_candidates
from outrider.engine.interface.logits import LogitsRow
from verifier_svc.proposers.ngram_proposer import prune

SENDER = -1  # the heads' key in the tree
LEVEL_NODES = 8  # nodes of a session that are expanded in one level
MAX_NODES = 64  # nodes that are expanded in a round


class RoundTerms(NamedTuple):
    """What a round goes by."""

    tree: TokenTree
    sampler: Sampler
    vocabulary: int  # the target chooses only ids below it
    plan: Plan  # not deeper than the heads draft
    min_path_score: float  # path score below which a node is not worth verifying


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
        self.cost_tokens = 0.0  # tokens that could be committed in the time of the round
        self._shared = rule_of(contract).child_sampling is ChildSampling.FREELY
        self._fits = fits
        self._rows: dict[Node, tuple[int, Candidates]] = {}  # of expanded nodes: row number, candidates
        self._last_id = 0
        self._terms: RoundTerms  # of the latest round

    def begin(self, terms: RoundTerms) -> None:
        """Begins a round: removes the last round's nodes, which were drafted from guessed features."""
        self._rows.clear()
        self._terms = terms
        prune(terms.tree, terms.tree.root, SENDER)

    def draw(self, *, restricts: bool) -> Draw | None:
        """Return the target's own draw, where an engine can take it; `restricts`: see `Sampler.draw`."""
        return self._terms.sampler.draw(restricts=restricts) if self._shared else None

    def growth(self) -> Growth:
        """Return how levels grow below the root by themselves."""
        tree, plan = self._terms.tree, self._terms.plan
        floor = math.log(floor_score(self._terms.min_path_score))
        last = tree.root.position + plan.depth - 1
        return Growth(
            tree.root.position + 1, np.zeros(1), self._fits[0].scale.scale, min(plan.width, CHILDREN), floor, last
        )

    def expected_gain(self, level: int) -> float:
        """Return the tokens that a level below the root is expected to bring, before any is drafted; the first is 1."""
        plan = self._terms.plan
        if level >= plan.depth:
            return 0.0
        reach = math.prod(fits.kept(plan.width) for fits in self._fits[:level])
        return self._fits[level].gain([reach], plan.width, self._terms.min_path_score)

    def propose(self, node: Node, number: int, row: LogitsRow) -> None:
        """Add a node's children from the row of that number, as far as they are worth verifying."""
        terms = self._terms
        path = terms.tree.path(node)
        with suppress(GrammarDelayed):
            self._add_children(
                node, number, row_candidates(row, terms.sampler, path, terms.vocabulary, noised=self._shared)
            )

    def propose_grown(self, numbered: list[Node | None], first: int, level: GrownLevel, tree: int) -> None:
        """Add the children of a grown level's rows whose nodes are in the tree.

        `numbered`: the nodes of the levels before, which this one's are added to; `first`: the number of its first row;
        `tree`: the index of this session's tree in the level.
        """
        for number, (parent, token, best) in enumerate(level.rows(tree), first):
            above = numbered[parent] if parent >= 0 else None
            node = None if above is None else above.children.get(token)
            known = None if node is None or node in self._rows else known_candidates(best, self._terms.vocabulary)
            numbered.append(None if known is None else node)
            if node is not None and known is not None:
                self._add_children(node, number, known)

    def frontier(self) -> list[Node]:
        """Return the nodes to expand next, best first, whoever drafted them."""
        if len(self._rows) >= MAX_NODES:
            return []
        plan, found = self._terms.plan, list[Node]()
        for score, node in self._terms.tree.best_first(depth=plan.depth - 1, width=plan.width):
            if score < floor_score(self._terms.min_path_score) or len(found) == LEVEL_NODES:
                break
            if node.parent in self._rows and node not in self._rows:
                found.append(node)
        return found

    def speculator_node(self, node: Node) -> HeadNodes:
        """Return a node of the frontier as the speculator takes it."""
        assert node.parent is not None
        return HeadNodes(self._rows[node.parent][0], node.token)

    def gain(self, nodes: Sequence[Node]) -> float:
        """Return the tokens that expanding these nodes is expected to bring, less the cost of verifying children."""
        tree, width, min_path_score = self._terms.tree, self._terms.plan.width, self._terms.min_path_score
        return sum(self._fits[tree.depth(node)].gain([tree.score(node)], width, min_path_score) for node in nodes)

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
            gate.observe(gain, self.cost_tokens)
        node: Node | None = tree.root
        for token in tokens:
            if node is None or node not in self._rows:
                break
            self._fits[tree.depth(node)].observe(self._rows[node][1], token, None)
            node = node.children.get(token)
        self._rows.clear()

    def _add_children(self, node: Node, number: int, row: Candidates) -> None:
        """Add a node's children, and keep its candidates to learn from when the target has chosen."""
        tree, width = self._terms.tree, self._terms.plan.width
        self._rows[node] = number, row
        min_edge = floor_score(self._terms.min_path_score) / tree.score(node)
        for token, claimed in self._fits[tree.depth(node)].edges(row, width, None):
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
