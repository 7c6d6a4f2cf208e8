"""Token trees proposed without a model, the interface of their sources, and the choice of the best nodes."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Continuation:
    """A token tree that may follow a text: best path score first, hence parents before children."""

    parents: tuple[int, ...] = ()  # [nodes] index of each node's parent; -1 is the root, the text's last token
    tokens: tuple[int, ...] = ()  # [nodes]
    chances: tuple[float, ...] = ()  # [nodes] probability that the node is the target's token if its parent is
    matched: int = 0  # length in tokens of the match of the text's end; 0: no match

    @property
    def expected(self) -> float:
        """The sum of the path scores: the expected number of accepted tokens (OPT-Tree, arXiv 2406.17276)."""
        return sum(self._scores())

    @property
    def first(self) -> dict[int, float]:
        """The tokens that may come next, and their probabilities."""
        return {
            token: chance
            for parent, token, chance in zip(self.parents, self.tokens, self.chances, strict=True)
            if parent < 0
        }

    def with_first(self, chances: Mapping[int, float], nodes: int) -> Continuation:
        """Return the best `nodes` nodes after the first tokens got the probabilities `chances`, which must include all
        tokens of `first`."""
        known = self.first
        new = [token for token in chances if token not in known]
        tree = Continuation(
            (*self.parents, *(-1 for _ in new)),
            (*self.tokens, *new),
            (
                *(
                    chances[token] if parent < 0 else chance
                    for parent, token, chance in zip(self.parents, self.tokens, self.chances, strict=True)
                ),
                *(chances[token] for token in new),
            ),
            self.matched,
        )
        scores = tree._scores()
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[:nodes]  # stable: parents stay before
        place = {old: index for index, old in enumerate(best)} | {-1: -1}
        return Continuation(
            tuple(place[tree.parents[old]] for old in best),
            tuple(tree.tokens[old] for old in best),
            tuple(tree.chances[old] for old in best),
            self.matched,
        )

    def _scores(self) -> list[float]:
        """Return the path scores: [nodes]."""
        scores: list[float] = []
        for parent, chance in zip(self.parents, self.chances, strict=True):
            scores.append(chance if parent < 0 else scores[parent] * chance)
        return scores


NOTHING = Continuation()


class ContinuationSource(Protocol):
    """Proposes tokens without a model."""

    def propose(self, text_end: Sequence[int], nodes: int, depth: int) -> Continuation:
        """Propose what may follow a text: at most `nodes` nodes, at most `depth` deep, with the largest path scores.

        `text_end` holds the text's last tokens: all, or at least as many as the longest match that the source looks
        for.
        """


class BestOf:
    """Takes, among several sources' proposals, the one with the most expected tokens.

    Source: SuffixDecoding (Oliaro et al., arXiv 2411.04975), section 3, which chooses in this way between a request's
    own tree and the tree over earlier outputs.
    """

    def __init__(self, sources: Sequence[ContinuationSource]) -> None:
        self._sources = tuple(sources)

    def propose(self, text_end: Sequence[int], nodes: int, depth: int) -> Continuation:
        """Return the best proposal; on a tie, that of the first source."""
        proposals = (source.propose(text_end, nodes, depth) for source in self._sources)
        return max(proposals, key=lambda proposal: proposal.expected, default=NOTHING)


class Trie(Protocol):
    """A trie of continuations, whose nodes may be built on demand."""

    def children(self) -> Iterable[Branch]:
        """Return the tokens that may follow. Their probabilities sum to at most 1."""


class Branch(NamedTuple):
    """One child of a trie's node."""

    token: int
    chance: float  # probability that it is the target's token if all tokens before it were
    below: Trie


def best_nodes(trie: Trie, nodes: int, depth: int, matched: int, min_score: float = 0.0) -> Continuation:
    """Return the `nodes` nodes of a trie with the largest path scores, at most `depth` deep, none below `min_score`.

    No other subtree of that size has a larger sum of path scores, because a node's score is never above its parent's
    (OPT-Tree, arXiv 2406.17276, section 3). Only the children of chosen nodes are read, so a trie may be built on
    demand.
    """
    parents: list[int] = []
    tokens: list[int] = []
    chances: list[float] = []
    heap: list[tuple[float, int, int, int, Branch]] = []  # (-score, order of discovery, parent, depth, branch)
    order = 0

    def open_(below: Trie, parent: int, level: int, score: float) -> None:
        nonlocal order
        for branch in below.children():
            order += 1
            heapq.heappush(heap, (-score * branch.chance, order, parent, level, branch))

    if nodes > 0 and depth > 0:
        open_(trie, -1, 1, 1.0)
    while heap and len(tokens) < nodes and -heap[0][0] >= min_score:
        cost, _, parent, level, branch = heapq.heappop(heap)
        parents.append(parent)
        tokens.append(branch.token)
        chances.append(branch.chance)
        if level < depth and len(tokens) < nodes:
            open_(branch.below, len(tokens) - 1, level + 1, -cost)
    return Continuation(tuple(parents), tuple(tokens), tuple(chances), matched) if tokens else NOTHING
