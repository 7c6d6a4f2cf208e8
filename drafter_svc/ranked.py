"""A tree that goes where the target is likely to go, for rules that take any tree."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from drafter_svc.replica import Snapshot
from drafter_svc.session import DraftSession, Move
from outrider.core.construction import BestFirst, Construction, Shaped, Terms
from outrider.core.growth import CANDIDATES, WORTH_TELLING, Candidates, Fits, floor_score
from outrider.core.noise import Draw
from outrider.core.repeats import Hint, RepeatFit, Repeats
from outrider.core.rules import Drawn, rule_of
from outrider.core.tree import Delta, Node
from outrider.engine.logits import Row

AT_ONCE = 1024  # tokens of a text that are read where the session begins; some two milliseconds


class RankedSession(DraftSession):
    """Candidates are ranked by log q, plus the noise where the target shares it. The construction decides which nodes
    are expanded and told."""

    def __init__(
        self,
        snapshot: Snapshot,
        slot: int,
        vocabulary: int,
        construction: Construction | None = None,
        *,
        first_id: int = 1,
        cached: int = 0,
        repeats: Repeats | None = None,
    ) -> None:
        """`construction`: None is the default, best first; `repeats`: of the session as it was, which this one takes
        over."""
        super().__init__(snapshot, slot, vocabulary, construction or BestFirst(), first_id=first_id, cached=cached)
        self._shared = rule_of(snapshot.contract).drawn is Drawn.FREELY
        self._rows: dict[Node, Candidates] = {}  # of expanded nodes, to learn from when the target has spoken
        self.repeats = repeats or Repeats(())
        self.repeats.keep(self.tokens)
        self._hints: dict[Node, Hint] = {}  # along the chain of what followed the tree's root before
        self._looked_up = -1  # position of that root
        self._lessons: list[tuple[Candidates | None, int, Hint | None]] = []  # with what the target said
        self.read_on(AT_ONCE)

    @property
    def draw(self) -> Draw | None:
        """As the target's, where that shares its noise."""
        return self.sampler.draw if self._shared else None

    @property
    def behind(self) -> bool:
        """Whether repetitions cannot be looked up yet, and are wanted."""
        return not self._has_read and self.construction.guesses and self.wanted

    def read_on(self, most: int) -> int:
        """Of what repetitions are looked up in."""
        part = self.tokens[self.repeats.length : self.repeats.length + most]
        self.repeats.extend(part)
        return len(part)

    def frontier(self, fits: Fits, limit: int) -> list[Node]:
        """As the construction says."""
        return self.construction.frontier(self.tree, self._bounds(fits, limit))

    def gain(self, fits: Fits, nodes: Sequence[Node]) -> float:
        """By what children usually are worth."""
        return fits.gain(map(self.tree.score, nodes), self.construction.width(self.plan), self.price)

    def expand(self, nodes: Sequence[Node], rows: Sequence[Row], fits: Fits) -> Delta:
        """Proposes the best candidates of each row."""
        terms = self._bounds(fits)
        added: list[Node] = []
        for node, row in zip(nodes, rows, strict=True):
            node.expanded = True
            if not self.tree.holds(node):
                continue  # it was guessed at, and has just been found not to be worth it
            self._rows[node] = self._candidates(node, row)
            self.judge([child for child in node.children.values() if child.names], fits)
            added += self._propose(node, self._rows[node], fits, terms)
        return self.announce(added)

    def judge(self, nodes: Sequence[Node], fits: Fits) -> None:
        """What this model says of nodes that a lower tier has drafted, where it has seen their parents. The upstream
        hears it with the next delta."""
        for node in nodes:
            row = self._rows.get(node.parent) if node.parent else None
            if row is None or node.judged or node.parent is None:
                continue
            (edge,) = fits.judge(row, (node.token,), self._hints.get(node.parent))
            if abs(edge - node.edge) > WORTH_TELLING and node.names:
                self._rescored.append(node)
            self.tree.rescore(node, edge)

    def refill(self, fits: Fits) -> Delta:
        """Proposes again from rows that are known already: children that were not worth sending may have become so.
        Also guesses at what to run next."""
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

    def rest(self, fits: Fits) -> Delta:
        """What the construction held back, as far as the credit goes."""
        return self.announce(self.construction.rest(self.tree, self._bounds(fits))[: self.room])

    def learn(self, fits: Fits) -> None:
        """Fits the scores to what the target said."""
        for row, token, hint in self._lessons:
            if hint is not None:
                fits.repeats.observe(hint.length, hint.token == token)
            if row is not None:
                fits.observe(row, token, hint)
        self._lessons.clear()

    def commit(self, tokens: Sequence[int]) -> Move | None:
        """Also forgets the rows of what is gone."""
        had_read = self._has_read
        move = super().commit(tokens)
        if had_read:
            self.repeats.extend(tokens)
        self._keep_rows({self.tree.root, *self.scratch})
        return move

    def abandon(self, identities: Sequence[int]) -> list[tuple[int, int]]:
        """Also forgets the rows of what is gone."""
        names = super().abandon(identities)
        if identities:
            self._keep_rows({self.tree.root, *(node for _, node in self.tree.best_first(depth=2**32, width=2**32))})
        return names

    @property
    def _has_read(self) -> bool:
        return self.repeats.length == len(self.tokens)

    @property
    def _floor(self) -> float:
        """Path score below which a node is not worth sending."""
        return floor_score(self.price, ahead=self.ahead)

    def _candidates(self, node: Node, row: Row) -> Candidates:
        best = row.best
        if best is not None:
            known = np.isfinite(best.scores) & (best.tokens < self.usable)  # the others are padding
            if known.any():
                return Candidates(best.tokens[known], best.scores[known])
        logits, path = row.logits[: self.usable], self.tree.path(node)
        return Candidates(*self.sampler.leading(logits, path, CANDIDATES, noised=self._shared))

    def _propose(self, node: Node, row: Candidates, fits: Fits, terms: Terms) -> list[Node]:
        scored = fits.edges(row, self.construction.width(self.plan), self._hints.get(node))
        return self.construction.propose(self.tree, node, scored, terms)

    def _bounds(self, fits: Fits, limit: int = 2**31) -> Terms:
        rates = fits.ranks.rates(self.plan.width) if isinstance(self.construction, Shaped) else ()
        return self._terms(rates, limit)

    def _re_root(self, tokens: Sequence[int]) -> list[Node]:
        self._note_lessons(tokens)
        return self.tree.commit(tokens)

    def _keep_rows(self, alive: set[Node]) -> None:
        self._rows = {node: row for node, row in self._rows.items() if node in alive}

    def _look_up(self, fit: RepeatFit) -> None:
        """Once for each root, adds what followed before as a chain, as far as it is worth running. Nothing before all
        of the text is read.

        The upstream hears of a node of the chain when the model has judged it.
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

    def _note_lessons(self, tokens: Sequence[int]) -> None:
        node: Node | None = self.tree.root
        for token in tokens:
            if node is None:
                return
            row, hint = self._rows.get(node), self._hints.get(node)
            if row is None and hint is None:
                return
            self._lessons.append((row, token, hint))
            node = node.children.get(token)
