"""What followed the longest match of a text's end: in the text itself, and in the outputs that a tenant got before.

Source: SuffixDecoding (Oliaro et al., arXiv 2411.04975). A tree over a request's own prompt and output, another over
earlier outputs; the longest match is looked up in each, the tokens that followed are counted into a tree, which is cut
to its likeliest nodes, and the better proposal counts (`outrider.core.continuations.BestOf`). Where the paper scores by
counts alone and bounds the tree by the length of the match, the chances here also fall back on shorter matches, and
what both are worth is learned (`outrider.core.interpolation`), so that a score is a chance.

Nothing here is safe to use from several threads.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Sequence
from itertools import groupby, islice
from operator import itemgetter

from outrider.core.contexts import LONGEST, ContextTree
from outrider.core.continuations import NOTHING, Continuation, best_nodes
from outrider.core.interpolation import Followers, Interpolation, Run, Runs

PLACES = 32  # latest places of the longest matches that are counted; more say no more
LESSONS = 16  # of so many tokens that are added at once, one is learned from
PIECE = 512  # tokens of an output that are added, and leave, at a time: a few milliseconds
CAPACITY = 2**18  # tokens of finished outputs that are kept for a tenant: some 50 MB
TENANTS = 16


class SessionSuffixes:
    """A source over one session's own prompt and output, which grows token by token.

    Measured over Python source of 1,000 to 400,000 tokens: a token takes about 200 bytes; 2 to 8 microseconds where
    many are added at once, 30 to 60 where it comes alone and is learned from. A proposal of 16 nodes takes 40 to 160.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        """Starts over the tokens so far. A long text is better added in parts: 100,000 tokens take half a second."""
        self._contexts = ContextTree()
        self._interpolation = Interpolation()
        self._end: list[int] = []
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on. What it says of the proposals that would have been made is learned."""
        stride = 1 if len(tokens) <= LESSONS else LESSONS
        for first in range(0, len(tokens), stride):
            part = tokens[first : first + stride]
            self._interpolation.observe(_found(self._contexts, self._end, 1), part[0])
            self._contexts.extend(part)
            self._end = [*self._end, *part][-LONGEST:]

    def propose(self, text_end: Sequence[int], nodes: int, depth: int) -> Continuation:
        """What followed in this text. Where it runs in a loop, the loop goes round."""
        return _proposal(self._contexts, self._interpolation, text_end, nodes, depth)


class FinishedOutputs:
    """A source over one tenant's finished outputs, at most `capacity` tokens: the oldest leave first.

    A long one is kept in pieces that know nothing of one another. Its first piece is added at once, the others one by
    one while sessions learn, so that nothing here takes long. Measured at the capacity: 6 microseconds a token.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self._contexts = ContextTree()
        self._interpolation = Interpolation()
        self._lengths: deque[int] = deque()  # of the outputs kept, oldest first
        self.tokens = 0  # kept
        self._waiting: deque[Sequence[int]] = deque()  # pieces; no more tokens than are kept

    def add(self, output: Sequence[int]) -> None:
        """Keeps an output, or as much of its end as there is room for."""
        output = output[-self.capacity :] if self.capacity else ()
        self._waiting.extend(output[first : first + PIECE] for first in range(0, len(output), PIECE))
        while sum(map(len, self._waiting)) > self.capacity:
            self._waiting.popleft()
        self._catch_up()

    def _catch_up(self) -> None:
        """Adds a piece that waits."""
        if self._waiting:
            self._add(self._waiting.popleft())

    def _add(self, output: Sequence[int]) -> None:
        for last in range(LESSONS, len(output), LESSONS):  # while the output itself is not there to be found
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
        """The target said `token` after a text: what the outputs say of such texts is believed more, or less."""
        self._catch_up()
        self._interpolation.observe(_found(self._contexts, text_end, 1), token)

    def propose(self, text_end: Sequence[int], nodes: int, depth: int) -> Continuation:
        """What followed in the outputs."""
        return _proposal(self._contexts, self._interpolation, text_end, nodes, depth)


class TenantOutputs:
    """Finished outputs of several tenants, each of which sees its own alone."""

    def __init__(self, capacity: int = CAPACITY, tenants: int = TENANTS) -> None:
        """Keeps `capacity` tokens for each of the `tenants` that asked last."""
        self._capacity = capacity
        self._most = tenants
        self._tenants: OrderedDict[Hashable, FinishedOutputs] = OrderedDict()

    def of(self, tenant: Hashable) -> FinishedOutputs:
        """The outputs of one tenant."""
        found = self._tenants.setdefault(tenant, FinishedOutputs(self._capacity))
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > self._most:
            self._tenants.popitem(last=False)
        return found


def _proposal(
    contexts: ContextTree, interpolation: Interpolation, end: Sequence[int], nodes: int, depth: int
) -> Continuation:
    found = _found(contexts, end, depth)
    if not found:
        return NOTHING
    return best_nodes(Followers(found, interpolation), nodes, depth, matched=found[0].matched)


def _found(contexts: ContextTree, end: Sequence[int], depth: int) -> list[Runs]:
    """What followed the places that match `end`, the longest matches first."""
    matches = islice(contexts.matches(end), PLACES)
    return [
        Runs(
            matched, [Run(*each) for each in Counter(tuple(contexts.follow(place, depth)) for _, place in same).items()]
        )
        for matched, same in groupby(matches, key=itemgetter(0))
    ]
