"""A tree of the likeliest candidates, for rules that take any tree."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from drafter_svc.sessions.session import DrafterSession, KvMove
from outrider.core.acceptance import ChildSampling, rule_of
from outrider.core.construction import BestFirst, Construction, StaticConstruction, TreeTerms
from outrider.core.construction.expansion import (
    LOWEST_SCORE,
    RESEND_THRESHOLD,
    Candidates,
    DrafterFits,
    floor_score,
)
from outrider.core.construction.self_repetition import Hint, RepeatFit, Repeats
from outrider.core.sampling.noise import Draw
from outrider.core.session.snapshot import MirrorSnapshot
from outrider.core.tree.delta import Delta
from outrider.core.tree.node import Node
from outrider.engine.growth import CHILDREN, LEVEL_ROWS, MOST_LEVELS, GrownLevel, Growth
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.candidates import known_candidates, row_candidates
from outrider.engine.interface.engine import SCRATCH, Traits
from outrider.engine.interface.logits import LogitsRow

READ_AT_ONCE = 1024  # tokens of a text that are read when the session begins; takes about two milliseconds
_NO_NODE = Node(-1, -1, None, 0.0)  # of cache rows whose node is not in the tree


class TopKSession(DrafterSession):
    """Ranks candidates by log q, plus the noise where the target shares it. The construction decides which nodes are
    expanded and sent.
    """

    def __init__(
        self,
        snapshot: MirrorSnapshot,
        slot: int,
        vocabulary: int,
        construction: Construction | None = None,
        *,
        first_id: int = 1,
        cached: int = 0,
        repeats: Repeats | None = None,
    ) -> None:
        """`construction`: None is the default, best first; `repeats`: of the session before its restart, which this one
        takes over.
        """
        super().__init__(snapshot, slot, vocabulary, construction or BestFirst(), first_id=first_id, cached=cached)
        self._shared = rule_of(snapshot.contract).child_sampling is ChildSampling.FREELY
        self._rows: dict[Node, Candidates] = {}  # of expanded nodes, to learn from when the target has chosen
        self.repeats = repeats or Repeats(())
        self.repeats.keep(self.tokens)
        self._hints: dict[Node, Hint] = {}  # along the chain of what followed the root's tokens earlier
        self._looked_up = -1  # position of the root that was looked up last
        self._observations: list[tuple[Candidates | None, int, Hint | None]] = []  # with the target's token
        self.read_on(READ_AT_ONCE)

    def draw(self, engine: Traits) -> Draw | None:
        """Return the target's own draw, where its noise is shared and the engine can take it."""
        return self.sampler.draw(restricts=engine.restricts_tokens) if self._shared and engine.samples_tokens else None

    @property
    def behind(self) -> bool:
        """Whether repetitions are wanted and cannot be looked up yet."""
        return not self._has_read and self.construction.guesses and self.worth_drafting

    def read_on(self, limit: int) -> int:
        """Read more of the text that repetitions are looked up in. Return the number of tokens."""
        part = self.tokens[self.repeats.length : self.repeats.length + limit]
        self.repeats.extend(part)
        return len(part)

    def frontier(self, fits: DrafterFits, limit: int) -> list[Node]:
        """Return the nodes that the construction chooses."""
        return self.construction.frontier(self.tree, self._bounds(fits, limit))

    def gain(self, fits: DrafterFits, nodes: Sequence[Node]) -> float:
        """Return the expected gain by what children usually bring."""
        return fits.gain(map(self.tree.score, nodes), self.construction.width(self.plan), self.terms.min_path_score)

    def expand(self, nodes: Sequence[Node], rows: Sequence[LogitsRow], fits: DrafterFits) -> Delta:
        """Proposes the best candidates of each row."""
        for node in nodes:
            node.expanded = True
        # A guessed node may just have been found not to be worth expanding.
        found = (
            (node, row_candidates(row, self.sampler, self.tree.path(node), self.usable, noised=self._shared))
            for node, row in zip(nodes, rows, strict=True)
            if self.tree.holds(node)
        )
        return self._add_children(found, fits)

    def growth(
        self, fits: DrafterFits, segment: Segment, nodes: Sequence[Node], beside: int
    ) -> tuple[Growth, int] | None:
        """Return the growth of a tree whose nodes are chosen by path score, each as soon as it can be."""
        tree, plan = self.tree, self.plan
        if not (self._shared and self.construction.guesses and nodes) or self.contract.grammar is not None:
            return None
        if segment.prefix + segment.span - len(self.tokens) + MOST_LEVELS * LEVEL_ROWS > SCRATCH:
            return None  # the level after this one may make room
        width = min(self.construction.width(plan), CHILDREN)
        most = MOST_LEVELS if self.terms.time_cost_tokens_per_s else beside
        most = min(most, plan.depth - 1 - min(map(tree.depth, nodes)))
        if not self.terms.ahead:  # a step has room for no more
            most = min(most, -(-(plan.nodes - len(self._rows) - len(nodes)) // LEVEL_ROWS))
        levels, gain, kept = 0, self.gain(fits, nodes), fits.kept(width)
        while levels < most and (gain := gain * kept) > max(self.level_cost_tokens, LOWEST_SCORE):
            levels += 1
        if not levels:
            return None
        base, last = len(self.tokens), tree.root.position + plan.depth - 1
        log_scores = np.array([node.log_score - tree.root.log_score for node in nodes])
        return Growth(base, log_scores, fits.scale.scale, width, math.log(self._floor), last), levels

    def add_level(self, numbered: list[Node | None], level: GrownLevel, tree: int, fits: DrafterFits) -> Delta:
        """Proposes the best candidates of the rows whose nodes are in the tree, too."""
        found: list[tuple[Node, Candidates]] = []
        for parent, token, best in level.rows(tree):
            above = numbered[parent] if parent >= 0 else None
            node = None if above is None else above.children.get(token)
            candidates = None if node is None or node.expanded else known_candidates(best, self.usable)
            if node is None or candidates is None:
                numbered.append(None)
                self._hold([_NO_NODE])
                continue
            numbered.append(node)
            self._hold([node])
            node.expanded = True
            found.append((node, candidates))
        return self._add_children(((node, row) for node, row in found if self.tree.holds(node)), fits)

    def rescore(self, nodes: Sequence[Node], fits: DrafterFits) -> None:
        """Scores nodes that a lower tier has drafted by this model, where it has expanded their parents. The next delta
        sends the new scores.
        """
        for node in nodes:
            row = self._rows.get(node.parent) if node.parent else None
            if row is None or node.rescored or node.parent is None:
                continue
            (edge,) = fits.rescore(row, (node.token,), self._hints.get(node.parent))
            if abs(edge - node.edge) > RESEND_THRESHOLD and node.names:
                self._rescored.append(node)
            self.tree.rescore(node, edge)

    def refill(self, fits: DrafterFits) -> Delta:
        """Proposes again from known rows: children that were not worth sending may have become so. Also adds guessed
        nodes to run next.
        """
        if self.construction.guesses:
            self._look_up(fits.repeats)
        terms = self._bounds(fits)
        width = self.construction.width(self.plan)
        added: list[Node] = []
        for node, row in self._rows.items():
            if len(added) + width > self.room:
                break
            open_ = self.tree.depth(node) < self.plan.depth and len(node.children) < width
            if open_ and self.tree.score(node) > self._floor:
                added += self._propose(node, row, fits, terms)
        return self.announce(added)

    def flush(self, fits: DrafterFits) -> Delta:
        """Return the nodes that the construction held back, as far as the credit goes."""
        return self.announce(self.construction.flush(self.tree, self._bounds(fits))[: self.room])

    def learn(self, fits: DrafterFits) -> None:
        """Fits the scores to the tokens that the target chose."""
        for row, token, hint in self._observations:
            if hint is not None:
                fits.repeats.observe(hint.length, hint.token == token)
            if row is not None:
                fits.observe(row, token, hint)
        self._observations.clear()

    def commit(self, tokens: Sequence[int]) -> KvMove | None:
        """Follows the commit, and drops the rows of nodes that have gone."""
        had_read = self._has_read
        move = super().commit(tokens)
        if had_read:
            self.repeats.extend(tokens)
        self._keep_rows({self.tree.root, *self.scratch})
        return move

    def remove_dropped(self, identities: Sequence[int]) -> list[tuple[int, int]]:
        """Remove dropped nodes, and the rows of nodes that have gone."""
        names = super().remove_dropped(identities)
        if identities:
            self._keep_rows({*self.tree.root.subtree()})
        return names

    @property
    def _has_read(self) -> bool:
        return self.repeats.length == len(self.tokens)

    @property
    def _floor(self) -> float:
        """Path score below which a node is not worth sending."""
        return floor_score(self.terms.min_path_score, ahead=self.terms.ahead)

    def _add_children(self, found: Iterable[tuple[Node, Candidates]], fits: DrafterFits) -> Delta:
        terms = self._bounds(fits)
        added: list[Node] = []
        for node, row in found:
            self._rows[node] = row
            self.rescore([child for child in node.children.values() if child.names], fits)
            added += self._propose(node, row, fits, terms)
        return self.announce(added)

    def _propose(self, node: Node, row: Candidates, fits: DrafterFits, terms: TreeTerms) -> list[Node]:
        scored = fits.edges(row, self.construction.width(self.plan), self._hints.get(node))
        return self.construction.propose(self.tree, node, scored, terms)

    def _bounds(self, fits: DrafterFits, limit: int = 2**31) -> TreeTerms:
        rates = fits.ranks.rates(self.plan.width) if isinstance(self.construction, StaticConstruction) else ()
        return self._terms(rates, limit)

    def _re_root(self, tokens: Sequence[int]) -> list[Node]:
        self._note_observations(tokens)
        return self.tree.commit(tokens)

    def _keep_rows(self, alive: set[Node]) -> None:
        self._rows = {node: row for node, row in self._rows.items() if node in alive}

    def _look_up(self, fit: RepeatFit) -> None:
        """Once for each root, add what followed an earlier repetition as a chain, as far as it is worth running. Add
        nothing before all of the text is read.

        A node of the chain is sent when the model has scored it.
        """
        if self._looked_up == self.tree.root.position or not self.plan.depth or not self._has_read:
            return
        self._looked_up = self.tree.root.position
        self._hints.clear()
        found = self.repeats.find(self.plan.depth)
        if found is None:
            return
        node = self.tree.root
        for length, token in enumerate(found.tokens, found.length):
            self._hints[node] = Hint(token, length)
            child = node.children.get(token)
            if child is None:
                if token >= self.usable:
                    break
                edge = math.log(fit.chance(length))
                if node.expanded or self.tree.score(node) * math.exp(edge) < self._floor:
                    break
                child = self.tree.add(node, token, edge)
            node = child

    def _note_observations(self, tokens: Sequence[int]) -> None:
        node: Node | None = self.tree.root
        for token in tokens:
            if node is None:
                return
            row, hint = self._rows.get(node), self._hints.get(node)
            if row is None and hint is None:
                return
            self._observations.append((row, token, hint))
            node = node.children.get(token)
