"""Drafting without a model: for one session, what may follow by what followed before.

Which ways there are is said by name: `prompt-lookup` looks for the longest repetition within the text and proposes one
chain; `suffix` counts what followed in the text and in the tenant's finished outputs, and proposes a tree; with a
store, either also looks into a corpus; `retrieval` looks there alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, get_args

from outrider.core.continuations import NOTHING, BestOf, Continuation, Source
from outrider.core.contract import SHARED_NOISE, Contract
from outrider.core.datastore import Datastore
from outrider.core.edges import edge_code, edge_from_code
from outrider.core.growth import Candidates
from outrider.core.noise import gumbel_at
from outrider.core.noised import Background, Found, NoisedFit
from outrider.core.repeats import RepeatFit, Repeats
from outrider.core.retrieval import Retrieval
from outrider.core.rules import Drawn, rule_of
from outrider.core.suffixes import FinishedOutputs, SessionSuffixes, TenantOutputs
from outrider.core.tree import Node, TokenTree
from outrider.errors import ConfigError

Way = Literal["prompt-lookup", "suffix", "retrieval"]
WAYS: tuple[str, ...] = get_args(Way)

LONGEST_END = 64  # tokens of the text's end that sources are shown; none looks at more
LEAST_CHANCE = 1e-6
MOST_FIRST = 8  # tokens that may come first, where the noise is asked


class Lookup(Protocol):
    """What one session asks."""

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on."""

    def propose(self, nodes: int, depth: int, path: Sequence[int] = ()) -> Continuation:
        """What may come next; with a `path`, if these tokens have come before."""

    def finish(self, output: Sequence[int]) -> None:
        """The session has ended with this answer."""


class PromptLookup:
    """The longest repetition within the text, as a chain.

    Sources: Saxena, "Prompt Lookup Decoding" (2023); Yang et al., arXiv 2304.04487. What a match is worth by its length
    is learned.
    """

    def __init__(self, fit: RepeatFit) -> None:
        self._repeats = Repeats(())
        self._fit = fit
        self._said: tuple[int, int] | None = None  # the match's length, and the token that it named

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on; learns from its first token."""
        if self._said is not None and tokens:
            self._fit.observe(self._said[0], self._said[1] == tokens[0])
        self._said = None
        self._repeats.extend(tokens)

    def propose(self, nodes: int, depth: int, path: Sequence[int] = ()) -> Continuation:
        """One chain."""
        found = self._repeats.find(min(nodes, depth), path)
        if found is None or not found.tokens:
            return NOTHING
        if not path:
            self._said = found.length, found.tokens[0]
        chances = (self._fit.chance(found.length + step) for step in range(len(found.tokens)))
        return Continuation(tuple(range(-1, len(found.tokens) - 1)), tuple(found.tokens), tuple(chances), found.length)

    def finish(self, output: Sequence[int]) -> None:
        """Nothing of it is kept."""


class Suffixes:
    """What followed in the text, in the tenant's finished outputs, in a corpus: whichever expects the most."""

    def __init__(self, own: bool, shared: FinishedOutputs | None, corpus: Retrieval | None) -> None:
        self._own = SessionSuffixes() if own else None
        self._shared = shared
        self._corpus = corpus
        self._end: list[int] = []
        sources: tuple[Source | None, ...] = (self._own, shared, corpus)
        self._best = BestOf([source for source in sources if source is not None])

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on. Of what comes a few tokens at a time all sources learn."""
        if not tokens:
            return
        if self._own is not None:
            self._own.extend(tokens)
        if self._end and len(tokens) <= LONGEST_END:
            if self._shared is not None:
                self._shared.learn(self._end, tokens[0])
            if self._corpus is not None:
                self._corpus.learn(self._end, tokens[0])
        self._end = [*self._end, *tokens][-LONGEST_END:]

    def propose(self, nodes: int, depth: int, path: Sequence[int] = ()) -> Continuation:
        """The best of all."""
        return self._best.propose([*self._end, *path][-LONGEST_END:], nodes, depth)

    def finish(self, output: Sequence[int]) -> None:
        """Keeps the answer for other sessions of the tenant."""
        if self._shared is not None:
            self._shared.add(output)


class Noised:
    """A lookup of a session whose target chooses under shared noise: its first token is judged by the noise, too."""

    def __init__(self, lookup: Lookup, fit: NoisedFit, contract: Contract) -> None:
        self._lookup = lookup
        self._fit = fit
        self._contract = contract
        self._said = Background()
        self._length = 0
        self._lesson: tuple[Found, Candidates] | None = None  # if the noise was asked since the text went on
        self._asked = False

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on; learns from its first token."""
        if self._lesson is not None and tokens:
            self._fit.observe(*self._lesson, tokens[0], self._said.usual(tokens[0]))
        self._lesson, self._asked = None, False
        self._said.extend(tokens)
        self._length += len(tokens)
        self._lookup.extend(tokens)

    def propose(self, nodes: int, depth: int, path: Sequence[int] = ()) -> Continuation:
        """What the lookup says, and the best that it did not find. Below a path the noise is not asked."""
        proposal = self._lookup.propose(nodes, depth, path)
        if path:
            return proposal
        found = proposal.first
        if not self._asked and self._length and nodes and depth:
            self._asked = True
            if self._fit.wanted(found):
                terms = self._contract.seed, self._contract.choice, self._length
                self._lesson = found, self._said.leading(found, partial(gumbel_at, *terms))
        if self._lesson is None:
            return proposal
        _, row = self._lesson
        return proposal.with_first(self._fit.mixed(found, row, MOST_FIRST), nodes)

    def finish(self, output: Sequence[int]) -> None:
        """The session has ended with this answer."""
        self._lookup.finish(output)


class Lookups:
    """Makes the lookups of a process's sessions; what they learn and share is here."""

    def __init__(self, way: Way, store: Datastore | None) -> None:
        """Raises ConfigError when the way needs a store and there is none."""
        if way == "retrieval" and store is None:
            raise ConfigError("store: retrieval needs one; make it with `outrider index`")
        self._way = way
        self._corpus = Retrieval(store) if store is not None else None
        self._outputs = TenantOutputs()
        self._fit = RepeatFit()
        self._noised: dict[str, NoisedFit] = {}  # by class of contracts

    @classmethod
    def open(cls, way: Way, store: Path | None, tokenizer_digest: bytes) -> Lookups:
        """With the store of that file, if one is named. Raises as the store does, and ConfigError."""
        return cls(way, None if store is None else Datastore.open(store, tokenizer_digest))

    def begin(self, tenant: str, contract: Contract) -> Lookup:
        """For a session that has no tokens yet."""
        lookup = self._begin(tenant)
        if contract.greedy or contract.rule != SHARED_NOISE or contract.restricts:
            return lookup
        kind = contract.heat + (" cut" if contract.cuts else "")
        return Noised(lookup, self._noised.setdefault(kind, NoisedFit()), contract)

    def _begin(self, tenant: str) -> Lookup:
        if self._way == "prompt-lookup" and self._corpus is None:
            return PromptLookup(self._fit)
        own = self._way != "retrieval"
        return Suffixes(own, self._outputs.of(tenant) if self._way == "suffix" else None, self._corpus)


def fits(contract: Contract) -> bool:
    """Whether a contract's rule takes what was looked up: not one that holds p against q, for there is no q."""
    return rule_of(contract).drawn is not Drawn.SAMPLED


def grow(
    tree: TokenTree,
    lookup: Lookup,
    *,
    nodes: int,
    depth: int,
    width: int,
    vocabulary: int,
    floor: float,
    room: int,
    judge: Callable[[float], float] = lambda edge: edge,
    start: Node | None = None,
) -> list[tuple[Node, float]]:
    """Adds what a lookup proposes below the root, or below `start`: nodes whose path score is at least `floor` and
    whose tokens are below `vocabulary`, at most `room` new ones.

    `judge` says what an edge is worth. Returns the new nodes, parents before children, and what was claimed of each.
    """
    start = start or tree.root
    proposal = lookup.propose(nodes, depth - tree.depth(start), tree.path(start))
    placed: list[Node | None] = []
    added: list[tuple[Node, float]] = []
    for above, token, chance in zip(proposal.parents, proposal.tokens, proposal.chances, strict=True):
        parent = start if above < 0 else placed[above]
        child = parent.children.get(token) if parent else None
        if parent and child is None and token < vocabulary and len(added) < room and len(parent.children) < width:
            claimed = edge_from_code(edge_code(math.log(max(chance, LEAST_CHANCE))))
            edge = judge(claimed)
            if tree.score(parent) * math.exp(edge) >= floor:
                child = tree.add(parent, token, edge)
                added.append((child, claimed))
        placed.append(child)
    return added
