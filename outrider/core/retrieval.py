"""What followed the longest match of a text's end in a corpus.

Source: REST (He et al., arXiv 2311.08252): the longest suffix of the text that the corpus has is looked up in a suffix
array, what followed some of its places is counted into a trie, and the likeliest nodes are proposed. Here shorter
suffixes have a say where the longest is rare, and what each is worth can be learned (`outrider.core.interpolation`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.core.continuations import NOTHING, Continuation, best_nodes
from outrider.core.datastore import Datastore
from outrider.core.interpolation import Followers, Interpolation, Run, Runs

SHORTEST = 2  # tokens that must match
LONGEST = 16  # longer matches say no more; no more than a store compares
PLACES = 128  # that are counted, evenly spread over all that match; twice as many proposed nothing better
ENOUGH = 32  # places; where as many match, no shorter match is asked


class Retrieval:
    """A source over a store. Any number of them may share one.

    Measured over one million tokens of Python source: a proposal of 16 nodes takes 180 to 260 microseconds in the
    median and 620 at the 99th percentile; over nine millions 260 to 390, and 710.
    """

    def __init__(self, store: Datastore) -> None:
        self._store = store
        self._interpolation = Interpolation()

    def propose(self, text_end: Sequence[int], nodes: int, depth: int) -> Continuation:
        """What followed in the corpus, within one document."""
        found = self._found(text_end, depth) if depth > 0 else []
        if not found:
            return NOTHING
        return best_nodes(Followers(found, self._interpolation), nodes, depth, matched=found[0].matched)

    def learn(self, text_end: Sequence[int], token: int) -> None:
        """The target said `token` after a text: what the corpus says of such texts is believed more, or less."""
        self._interpolation.observe(self._found(text_end, 1), token)

    def _found(self, end: Sequence[int], depth: int) -> list[Runs]:
        """What followed some places of the longest match, and of ever shorter ones while there are few."""
        pattern = list(end[-LONGEST:])
        found: list[Runs] = []
        counted, longer = 0, 0
        length = self._longest(pattern)
        while length >= SHORTEST and counted < ENOUGH:
            starts = self._sample(pattern[-length:], PLACES - counted)
            if longer:
                starts = starts[~self._stand_behind(pattern[-longer:-length], starts)]
            if len(starts):
                found.append(Runs(length, self._runs(starts + length, depth)))
                counted += len(starts)
            longer = length
            length = max(length // 2, SHORTEST) if length > SHORTEST else 0
        return found

    def _longest(self, pattern: list[int]) -> int:
        """How many of the last tokens of `pattern` the corpus has, one behind the other; 0 if fewer than `SHORTEST`."""
        low, high = SHORTEST - 1, len(pattern)
        while low < high:  # it has all ends of what it has
            length = (low + high + 1) // 2
            if self._range(pattern[-length:]):
                low = length
            else:
                high = length - 1
        return low if low >= SHORTEST else 0

    def _range(self, pattern: list[int]) -> range:
        """Where in the suffix array the suffixes stand that begin with `pattern`."""
        tokens, suffixes, length = self._store.tokens, self._store.suffixes, len(pattern)

        def beginning(start: np.uint32) -> list[int]:
            found: list[int] = tokens[int(start) : int(start) + length].tolist()
            return found

        first = bisect_left(suffixes, pattern, key=beginning)
        if first == len(suffixes) or beginning(suffixes[first]) != pattern:
            return range(first, first)
        return range(first, bisect_right(suffixes, pattern, first, key=beginning))

    def _sample(self, pattern: list[int], most: int) -> NDArray[np.int64]:
        """Where `pattern` stands: all places or `most` of them, in the order of what follows."""
        places = self._range(pattern)
        count = min(len(places), most)
        chosen = places.start + np.arange(count) * len(places) // max(1, count)
        return self._store.suffixes[chosen].astype(np.int64)

    def _stand_behind(self, before: list[int], starts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """At which of the places [starts] the tokens `before` precede."""
        same: NDArray[np.bool_] = (self._at(starts[:, None] + np.arange(-len(before), 0)) == before).all(axis=1)
        return same & (starts >= len(before))

    def _runs(self, places: NDArray[np.int64], depth: int) -> list[Run]:
        """What follows the places, in order: those that go on alike stand together."""
        tokens = self._at(places[:, None] + np.arange(depth))
        ended = tokens >= self._store.vocabulary
        lengths = np.where(ended.any(axis=1), ended.argmax(axis=1), depth)
        first = np.flatnonzero(np.concatenate([[True], (tokens[1:] != tokens[:-1]).any(axis=1)]))
        times = np.diff(first, append=len(places))
        return [
            Run(run[:length], count)
            for run, length, count in zip(tokens[first].tolist(), lengths[first].tolist(), times.tolist(), strict=True)
        ]

    def _at(self, positions: NDArray[np.int64]) -> NDArray[np.integer]:
        tokens = self._store.tokens
        return tokens[np.clip(positions, 0, len(tokens) - 1)]
