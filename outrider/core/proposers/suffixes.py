"""Suffix decoding: proposes what followed the longest match of a text's end, in the text itself and in a tenant's
earlier outputs.

Source: SuffixDecoding (Oliaro et al., arXiv 2411.04975). There is an index over a request's own prompt and output, and
another over earlier outputs. The longest match is looked up in each, the tokens that followed are counted in a tree,
which is cut to its likeliest nodes, and the better proposal is taken (`BestOf` of
`outrider.core.proposers.ngram_tree`). The paper scores only by counts and bounds the tree by the length of the match.
Here the probabilities also use shorter matches, and the weights of matches are learned
(`outrider.core.proposers.interpolation`), so that a score is a probability.

The classes of this module are not thread-safe.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Sequence
from itertools import groupby, islice
from operator import itemgetter

from outrider.core.proposers.interpolation import Interpolation, MatchRun, MatchRuns, MatchTrie
from outrider.core.proposers.ngram_tree import NOTHING, Continuation, best_nodes
from outrider.core.proposers.suffix_trie import LONGEST, SuffixTrie

PLACES = 32  # latest positions of the longest matches that are counted; more give no better proposals
LEARN_STRIDE = 16  # of this many tokens that are added at once, one is learned from
PIECE = 512  # tokens of an output that are added or removed at a time, in a few milliseconds
CAPACITY = 2**18  # tokens of finished outputs that are kept for a tenant, in some 50 MB
TENANTS = 16  # tenants whose outputs are kept


class SessionSuffixes:
    """A source over one session's own prompt and output, which grows token by token.

    Measured over Python source of 1,000 to 400,000 tokens: a token takes about 200 bytes; 2 to 8 microseconds where
    many are added at once, 30 to 60 where it is added alone and learned from. A proposal of 16 nodes takes 40 to 160
    microseconds.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        """Begin with the tokens so far. Add a long text in parts: 100,000 tokens take half a second."""
        self._contexts = SuffixTrie()
        self._interpolation = Interpolation()
        self._end: list[int] = []
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text, and learn how good the proposals before them would have been."""
        stride = 1 if len(tokens) <= LEARN_STRIDE else LEARN_STRIDE
        for first in range(0, len(tokens), stride):
            part = tokens[first : first + stride]
            self._interpolation.observe(_found(self._contexts, self._end, 1), part[0])
            self._contexts.extend(part)
            self._end = [*self._end, *part][-LONGEST:]

    def propose(self, text_end: Sequence[int], nodes: int, depth: int) -> Continuation:
        """Propose what followed in this text. Where the text is in a loop, the loop is repeated."""
        return _proposal(self._contexts, self._interpolation, text_end, nodes, depth)


class FinishedOutputs:
    """A source over one tenant's finished outputs, at most `capacity` tokens; the oldest outputs are removed first.

    A long output is kept as separate documents of PIECE tokens. Its first piece is added at once, the others one by one
    while sessions learn, so that no call takes long. Measured at the capacity: 6 microseconds a token.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self._contexts = SuffixTrie()
        self._interpolation = Interpolation()
        self._lengths: deque[int] = deque()  # lengths of the pieces kept, oldest first
        self.tokens = 0  # tokens kept
        self._waiting: deque[Sequence[int]] = deque()  # pieces to be added; at most `capacity` tokens

    def add(self, output: Sequence[int]) -> None:
        """Keep an output, or the last `capacity` tokens of it."""
        output = output[-self.capacity :] if self.capacity else ()
        self._waiting.extend(output[first : first + PIECE] for first in range(0, len(output), PIECE))
        while sum(map(len, self._waiting)) > self.capacity:
            self._waiting.popleft()
        self._catch_up()

    def _catch_up(self) -> None:
        """Add one waiting piece."""
        if self._waiting:
            self._add(self._waiting.popleft())

    def _add(self, output: Sequence[int]) -> None:
        for last in range(LEARN_STRIDE, len(output), LEARN_STRIDE):  # before the output itself can be found
            self._interpolation.observe(_found(self._contexts, output[max(0, last - LONGEST) : last], 1), output[last])
        while self.tokens + len(output) > self.capacity:
            oldest = self._lengths.popleft()
            self._contexts.drop(oldest + 1)
            self.tokens -= oldest
        self._contexts.extend(output)
        self._contexts.separate()
        self._lengths.append(len(output))
        self.tokens += len(output)

    def learn(self, text_end: Sequence[int], token: int) -> None:
        """Learn the weights of matches from the fact that the target chose `token` after a text."""
        self._catch_up()
        self._interpolation.observe(_found(self._contexts, text_end, 1), token)

    def propose(self, text_end: Sequence[int], nodes: int, depth: int) -> Continuation:
        """Propose what followed in the outputs."""
        return _proposal(self._contexts, self._interpolation, text_end, nodes, depth)


class TenantOutputs:
    """Finished outputs of several tenants, kept separately: no tenant's outputs serve another."""

    def __init__(self, capacity: int = CAPACITY, tenants: int = TENANTS) -> None:
        """Keep `capacity` tokens for each of the `tenants` most recently used tenants."""
        self._capacity = capacity
        self._max_tenants = tenants
        self._tenants: OrderedDict[Hashable, FinishedOutputs] = OrderedDict()

    def of(self, tenant: Hashable) -> FinishedOutputs:
        """Return the outputs of one tenant."""
        found = self._tenants.setdefault(tenant, FinishedOutputs(self._capacity))
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > self._max_tenants:
            self._tenants.popitem(last=False)
        return found


def _proposal(
    contexts: SuffixTrie, interpolation: Interpolation, end: Sequence[int], nodes: int, depth: int
) -> Continuation:
    found = _found(contexts, end, depth)
    if not found:
        return NOTHING
    return best_nodes(MatchTrie(found, interpolation), nodes, depth, matched=found[0].matched)


def _found(contexts: SuffixTrie, end: Sequence[int], depth: int) -> list[MatchRuns]:
    """Return what followed the positions that match `end`, the longest matches first."""
    matches = islice(contexts.matches(end), PLACES)
    return [
        MatchRuns(
            matched,
            [MatchRun(*each) for each in Counter(tuple(contexts.follow(place, depth)) for _, place in same).items()],
        )
        for matched, same in groupby(matches, key=itemgetter(0))
    ]
