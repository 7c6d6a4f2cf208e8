"""Drafting without a model: a session's next tokens are predicted from what followed similar text before.

There are three methods. `prompt-lookup` finds the longest repetition within the text and proposes one chain; `suffix`
counts what followed in the text and in the tenant's finished outputs, and proposes a tree; with a store, either also
searches a corpus; `retrieval` searches only the corpus.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from outrider.config import LookupMethod
from outrider.core.acceptance import ChildSampling, rule_of
from outrider.core.construction.expansion import Candidates
from outrider.core.construction.self_repetition import RepeatFit, Repeats
from outrider.core.proposers.datastore import Datastore
from outrider.core.proposers.ngram_tree import NOTHING, BestOf, Continuation, ContinuationSource
from outrider.core.proposers.noise_mixture import BackgroundDistribution, Found, NoiseMixtureFit
from outrider.core.proposers.retrieval import Retrieval
from outrider.core.proposers.suffixes import FinishedOutputs, SessionSuffixes, TenantOutputs
from outrider.core.sampling.grammar import GrammarDelayed, GrammarState
from outrider.core.sampling.noise import gumbel_at
from outrider.core.session.contract import SHARED_NOISE, Contract
from outrider.core.tree.node import Node
from outrider.core.tree.score_codec import edge_code, edge_from_code
from outrider.core.tree.token_tree import TokenTree
from outrider.errors import ConfigError

LONGEST_END = 64  # tokens of the text's end that sources receive; no source uses more
MIN_CHANCE = 1e-6  # lower bound of a proposed token's probability
MAX_FIRST = 8  # first tokens of a proposal that uses the noise


class Lookup(Protocol):
    """Proposes tokens for one session."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""

    def propose(self, nodes: int, depth: int, path: Sequence[int] = ()) -> Continuation:
        """Propose what may follow the text and the tokens of `path`: at most `nodes` nodes, at most `depth` deep."""

    def finish(self, output: Sequence[int]) -> None:
        """End the session, whose answer is `output`."""


class PromptLookup:
    """Proposes what followed the longest repetition within the text, as a chain.

    The probability of a match by its length is learned.

    Sources: Saxena, "Prompt Lookup Decoding" (2023); Yang et al., arXiv 2304.04487.
    """

    def __init__(self, fit: RepeatFit) -> None:
        self._repeats = Repeats(())
        self._fit = fit
        self._proposed: tuple[int, int] | None = None  # the length of the proposed match, and its first token

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text, and learn from the first one."""
        if self._proposed is not None and tokens:
            self._fit.observe(self._proposed[0], self._proposed[1] == tokens[0])
        self._proposed = None
        self._repeats.extend(tokens)

    def propose(self, nodes: int, depth: int, path: Sequence[int] = ()) -> Continuation:
        """Propose one chain."""
        found = self._repeats.find(min(nodes, depth), path)
        if found is None or not found.tokens:
            return NOTHING
        if not path:
            self._proposed = found.length, found.tokens[0]
        chances = (self._fit.chance(found.length + step) for step in range(len(found.tokens)))
        return Continuation(tuple(range(-1, len(found.tokens) - 1)), tuple(found.tokens), tuple(chances), found.length)

    def finish(self, output: Sequence[int]) -> None:
        """Do nothing: no answer is kept."""


class Suffixes:
    """Proposes what followed in the text, in the tenant's finished outputs, or in a corpus: the proposal with the most
    expected tokens."""

    def __init__(self, in_session: bool, shared: FinishedOutputs | None, corpus: Retrieval | None) -> None:
        self._session = SessionSuffixes() if in_session else None
        self._shared = shared
        self._corpus = corpus
        self._end: list[int] = []
        sources: tuple[ContinuationSource | None, ...] = (self._session, shared, corpus)
        self._best = BestOf([source for source in sources if source is not None])

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text. From at most LONGEST_END tokens at a time all sources learn."""
        if not tokens:
            return
        if self._session is not None:
            self._session.extend(tokens)
        if self._end and len(tokens) <= LONGEST_END:
            if self._shared is not None:
                self._shared.learn(self._end, tokens[0])
            if self._corpus is not None:
                self._corpus.learn(self._end, tokens[0])
        self._end = [*self._end, *tokens][-LONGEST_END:]

    def propose(self, nodes: int, depth: int, path: Sequence[int] = ()) -> Continuation:
        """Return the proposal of the source with the most expected tokens."""
        return self._best.propose([*self._end, *path][-LONGEST_END:], nodes, depth)

    def finish(self, output: Sequence[int]) -> None:
        """Keep the answer for other sessions of the tenant."""
        if self._shared is not None:
            self._shared.add(output)


class NoiseMixedSource:
    """A lookup for a session under shared noise: the noise also changes the probabilities of the first token."""

    def __init__(self, lookup: Lookup, fit: NoiseMixtureFit, contract: Contract) -> None:
        self._lookup = lookup
        self.fit = fit
        self._contract = contract
        self._background = BackgroundDistribution()
        self._length = 0
        self._pending: tuple[Found, Candidates] | None = None  # set where the noise was used since the last `extend`
        self._noise_used = False

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text, and learn from the first one."""
        if self._pending is not None and tokens:
            self.fit.observe(*self._pending, tokens[0], self._background.frequency(tokens[0]))
        self._pending, self._noise_used = None, False
        self._background.extend(tokens)
        self._length += len(tokens)
        self._lookup.extend(tokens)

    def propose(self, nodes: int, depth: int, path: Sequence[int] = ()) -> Continuation:
        """Return the lookup's proposal with the best tokens that it did not find. Below a path no noise is used."""
        proposal = self._lookup.propose(nodes, depth, path)
        if path:
            return proposal
        found = proposal.first
        if not self._noise_used and self._length and nodes and depth:
            self._noise_used = True
            if self.fit.wanted(found):
                terms = self._contract.seed, self._contract.choice, self._length
                self._pending = found, self._background.leading(found, partial(gumbel_at, *terms))
        if self._pending is None:
            return proposal
        _, row = self._pending
        return proposal.with_first(self.fit.mixed(found, row, MAX_FIRST), nodes)

    def finish(self, output: Sequence[int]) -> None:
        """End the session, whose answer is `output`."""
        self._lookup.finish(output)


class Lookups:
    """Creates the lookups of a process's sessions, and holds what these learn and share."""

    def __init__(self, method: LookupMethod, store: Datastore | None) -> None:
        """Raise ConfigError when the method needs a store and there is none."""
        if method == "retrieval" and store is None:
            raise ConfigError("store: retrieval needs one; make it with `outrider index`")
        self._method = method
        self._corpus = Retrieval(store) if store is not None else None
        self._outputs = TenantOutputs()
        self._fit = RepeatFit()
        self._noised: dict[str, NoiseMixtureFit] = {}  # by temperature bucket and `Contract.cuts`

    @classmethod
    def open(cls, method: LookupMethod, store: Path | None, tokenizer_digest: bytes) -> Lookups:
        """Create lookups with the store of the file `store`, if given. Raises what `Datastore.open` and the constructor
        raise."""
        return cls(method, None if store is None else Datastore.open(store, tokenizer_digest))

    def begin(self, tenant: str, contract: Contract) -> Lookup:
        """Return the lookup of a new session, which has no tokens yet."""
        lookup = self._begin(tenant, contract)
        if contract.greedy or contract.rule != SHARED_NOISE or contract.restricts:
            return lookup
        kind = contract.temperature_bucket + (" cut" if contract.cuts else "")
        fit = contract.own_or_shared(self._noised.setdefault(kind, NoiseMixtureFit()))
        return NoiseMixedSource(lookup, fit, contract)

    def _begin(self, tenant: str, contract: Contract) -> Lookup:
        if self._method == "prompt-lookup" and self._corpus is None:
            return PromptLookup(contract.own_or_shared(self._fit))
        in_session = self._method != "retrieval"
        outputs = self._outputs.of(tenant) if self._method == "suffix" else None
        return Suffixes(in_session, outputs, contract.own_or_shared(self._corpus))


def fits(contract: Contract) -> bool:
    """Return whether a contract's rule allows lookups: rules that compare p with q do not, because lookups have no
    q."""
    return rule_of(contract).child_sampling is not ChildSampling.SAMPLED


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
    calibrate: Callable[[float], float] = lambda edge: edge,
    start: Node | None = None,
    grammar: GrammarState | None = None,
) -> list[tuple[Node, float]]:
    """Add the proposals of a lookup below the root, or below `start`.

    Added are at most `room` new nodes, whose path score is at least `floor` and whose tokens are below `vocabulary`,
    and allowed by the `grammar`, if there is one. `calibrate` maps a claimed edge score to the one to use. Return the
    new nodes, parents before children, each with its claimed edge score.
    """
    start = start or tree.root
    proposal = lookup.propose(nodes, depth - tree.depth(start), tree.path(start))
    placed: list[Node | None] = []
    added: list[tuple[Node, float]] = []
    for above, token, chance in zip(proposal.parents, proposal.tokens, proposal.chances, strict=True):
        parent = start if above < 0 else placed[above]
        child = parent.children.get(token) if parent else None
        if parent and child is None and token < vocabulary and len(added) < room and len(parent.children) < width:
            claimed = edge_from_code(edge_code(math.log(max(chance, MIN_CHANCE))))
            edge = calibrate(claimed)
            worthwhile = tree.score(parent) * math.exp(edge) >= floor
            if worthwhile and (grammar is None or _allows(grammar, tree.path(parent), token)):
                child = tree.add(parent, token, edge)
                added.append((child, claimed))
        placed.append(child)
    return added


def _allows(grammar: GrammarState, path: Sequence[int], token: int) -> bool:
    try:
        return bool(grammar.first_allowed(path, (token,), 1))
    except GrammarDelayed:
        return False
