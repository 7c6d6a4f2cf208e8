"""A tree of the likeliest candidates, for rules that take any tree."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from drafter_svc.sessions.mirror import MirrorSnapshot
from drafter_svc.sessions.session import DraftSession, KvMove
from outrider.core.acceptance import ChildSampling, rule_of
from outrider.core.construction import BestFirst, Construction, StaticConstruction, TreeTerms
from outrider.core.construction.expansion import CANDIDATES, RESEND_THRESHOLD, Candidates, DrafterFits, floor_score
from outrider.core.construction.self_repetition import Hint, RepeatFit, Repeats
from outrider.core.sampling.noise import Draw
from outrider.core.tree.delta import Delta
from outrider.core.tree.node import Node
from outrider.engine.engine import Traits
from outrider.engine.logits import LogitsRow

READ_AT_ONCE = 1024  # tokens of a text that are read when the session begins; takes about two milliseconds


class TopKSession(DraftSession):
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
        return self.sampler.draw(restricts=engine.restricts) if self._shared and engine.samples else None

    @property
    def behind(self) -> bool:
        """Whether repetitions are wanted and cannot be looked up yet."""
        return not self._has_read and self.construction.guesses and self.worth_drafting

    def read_on(self, limit: int) -> int:
        """Reads more of the text that repetitions are looked up in. Returns the number of tokens."""
        part = self.tokens[self.repeats.length : self.repeats.length + limit]
        self.repeats.extend(part)
        return len(part)

    def frontier(self, fits: DrafterFits, limit: int) -> list[Node]:
        """Return the nodes that the construction chooses."""
        return self.construction.frontier(self.tree, self._bounds(fits, limit))

    def gain(self, fits: DrafterFits, nodes: Sequence[Node]) -> float:
        """Return the expected gain by what children usually bring."""
        return fits.gain(map(self.tree.score, nodes), self.construction.width(self.plan), self.terms.price)

    def expand(self, nodes: Sequence[Node], rows: Sequence[LogitsRow], fits: DrafterFits) -> Delta:
        """Proposes the best candidates of each row."""
        terms = self._bounds(fits)
        added: list[Node] = []
        for node, row in zip(nodes, rows, strict=True):
            node.expanded = True
            if not self.tree.holds(node):
                continue  # a guessed node that was just found not to be worth expanding
            self._rows[node] = self._candidates(node, row)
            self.rescore([child for child in node.children.values() if child.names], fits)
            added += self._propose(node, self._rows[node], fits, terms)
        return self.announce(added)

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
        """Removes dropped nodes, and the rows of nodes that have gone."""
        names = super().remove_dropped(identities)
        if identities:
            self._keep_rows({self.tree.root, *(node for _, node in self.tree.best_first(depth=2**32, width=2**32))})
        return names

    @property
    def _has_read(self) -> bool:
        return self.repeats.length == len(self.tokens)

    @property
    def _floor(self) -> float:
        """Path score below which a node is not worth sending."""
        return floor_score(self.terms.price, ahead=self.terms.ahead)

    def _candidates(self, node: Node, row: LogitsRow) -> Candidates:
        best = row.best
        if best is not None:
            known = np.isfinite(best.scores) & (best.tokens < self.usable)  # others are padding
            if known.any():
                return Candidates(best.tokens[known], best.scores[known])
        logits, path = row.logits[: self.usable], self.tree.path(node)
        return Candidates(*self.sampler.leading(logits, path, CANDIDATES, noised=self._shared))

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
        """Once for each root, adds what followed an earlier repetition as a chain, as far as it is worth running. Adds
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
