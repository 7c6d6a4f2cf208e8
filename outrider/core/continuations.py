"""What may come next, without asking a model: a small token tree, who proposes it, and which nodes are the best."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Continuation:
    """A token tree that may come next after a text: best path score first, hence parents before children."""

    parents: tuple[int, ...] = ()  # [nodes] index of each node's parent; -1 is the root, the text's last token
    tokens: tuple[int, ...] = ()  # [nodes]
    chances: tuple[float, ...] = ()  # [nodes] 0..1, that the node is the target's token if its parent is
    matched: int = 0  # tokens of the text's end that were found elsewhere; 0: nothing was

    @property
    def expected(self) -> float:
        """The sum of the path scores: how many tokens are expected to be accepted (OPT-Tree, arXiv 2406.17276)."""
        return sum(self._scores())

    @property
    def first(self) -> dict[int, float]:
        """The tokens that may come next, and their chances."""
        return {
            token: chance
            for parent, token, chance in zip(self.parents, self.tokens, self.chances, strict=True)
            if parent < 0
        }

    def with_first(self, chances: Mapping[int, float], nodes: int) -> Continuation:
        """With these chances of the tokens that may come next, all of `first` among them, and of the best `nodes`."""
        known = self.first
        new = [token for token in chances if token not in known]
        whole = Continuation(
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
        scores = whole._scores()
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[:nodes]  # stable: parents stay before
        place = {old: index for index, old in enumerate(best)} | {-1: -1}
        return Continuation(
            tuple(place[whole.parents[old]] for old in best),
            tuple(whole.tokens[old] for old in best),
            tuple(whole.chances[old] for old in best),
            self.matched,
        )

    def _scores(self) -> list[float]:
        """The path scores."""
        scores: list[float] = []
        for parent, chance in zip(self.parents, self.chances, strict=True):
            scores.append(chance if parent < 0 else scores[parent] * chance)
        return scores


NOTHING = Continuation()


class Source(Protocol):
    """Proposes without a model."""

    def propose(self, text_end: Sequence[int], nodes: int, depth: int) -> Continuation:
        """What may follow a text: the at most `nodes` nodes, at most `depth` deep, with the largest path scores.

        `text_end` are the latest tokens of the text, at least as many as the longest match that is looked for, or all.
        """
        ...


class BestOf:
    """Several sources, of which each time the one counts that expects the most accepted tokens.

    Source: SuffixDecoding (Oliaro et al., arXiv 2411.04975), section 3, which so chooses between a request's own tree
    and the one over earlier outputs.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = tuple(sources)

    def propose(self, text_end: Sequence[int], nodes: int, depth: int) -> Continuation:
        """The best source's proposal; the first one's where several are as good."""
        proposals = (source.propose(text_end, nodes, depth) for source in self._sources)
        return max(proposals, key=lambda proposal: proposal.expected, default=NOTHING)


class Trie(Protocol):
    """A trie of continuations, as far as anybody looks into it."""

    def children(self) -> Iterable[Branch]:
        """What may come next. The chances add up to 1 at the most."""
        ...


class Branch(NamedTuple):
    """One way on."""

    token: int
    chance: float  # that it is the target's token if all before it were
    below: Trie


def best_nodes(trie: Trie, nodes: int, depth: int, matched: int, least: float = 0.0) -> Continuation:
    """The `nodes` nodes of a trie with the largest path scores, at most `depth` deep, none below `least`. No other
    subtree of that size has a larger sum of path scores (OPT-Tree, section 3): a node's score is never above its
    parent's.

    Only nodes that are taken are opened, so a trie may be built as it is looked into.
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
    while heap and len(tokens) < nodes and -heap[0][0] >= least:
        cost, _, parent, level, branch = heapq.heappop(heap)
        parents.append(parent)
        tokens.append(branch.token)
        chances.append(branch.chance)
        if level < depth and len(tokens) < nodes:
            open_(branch.below, len(tokens) - 1, level + 1, -cost)
    return Continuation(tuple(parents), tuple(tokens), tuple(chances), matched) if tokens else NOTHING
