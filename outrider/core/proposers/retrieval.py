"""Retrieval: proposes what followed the longest match of a text's end in a corpus.

Source: REST (He et al., arXiv 2311.08252): the longest suffix of the text that occurs in the corpus is looked up in a
suffix array, the tokens that followed some of its positions are counted in a trie, and the likeliest nodes are
proposed. Here shorter suffixes count too where the longest one is rare, and the weight of each is learned
(`outrider.core.proposers.interpolation`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from copy import deepcopy

import numpy as np
from numpy.typing import NDArray

from outrider.core.proposers.datastore import Datastore
from outrider.core.proposers.interpolation import Interpolation, MatchRun, MatchRuns, MatchTrie
from outrider.core.proposers.ngram_tree import NOTHING, Continuation, best_nodes

SHORTEST = 2  # tokens that must match
LONGEST = 16  # tokens of the longest match that is looked for; at most what a store's order compares
PLACES = 128  # positions that are counted, evenly spread over all matches; twice as many gave no better proposals
ENOUGH = 32  # positions of longer matches from which no shorter match is looked up


class Retrieval:
    """A source over a store. Any number of sources may share a store.

    Measured over one million tokens of Python source: a proposal of 16 nodes takes 180 to 260 microseconds in the
    median and 620 at the 99th percentile; over nine million tokens 260 to 390, and 710.
    """

    def __init__(self, store: Datastore) -> None:
        self._store = store
        self._interpolation = Interpolation()

    def __deepcopy__(self, memo: dict[int, object]) -> Retrieval:
        """Return a source over the same store, with a copy of what this one has learned."""
        copied = Retrieval(self._store)
        copied._interpolation = deepcopy(self._interpolation, memo)
        return copied

    def propose(self, text_end: Sequence[int], nodes: int, depth: int) -> Continuation:
        """Propose what followed in the corpus, within one document."""
        found = self._found(text_end, depth) if depth > 0 else []
        if not found:
            return NOTHING
        return best_nodes(MatchTrie(found, self._interpolation), nodes, depth, matched=found[0].matched)

    def learn(self, text_end: Sequence[int], token: int) -> None:
        """Learn the weights of matches from the fact that the target chose `token` after a text."""
        self._interpolation.observe(self._found(text_end, 1), token)

    def _found(self, end: Sequence[int], depth: int) -> list[MatchRuns]:
        """Return what followed some positions of the longest match, and of shorter ones while there are few
        positions."""
        pattern = list(end[-LONGEST:])
        found: list[MatchRuns] = []
        counted, longer = 0, 0
        length = self._longest(pattern)
        while length >= SHORTEST and counted < ENOUGH:
            starts = self._sample(pattern[-length:], PLACES - counted)
            if longer:
                starts = starts[~self._stand_behind(pattern[-longer:-length], starts)]
            if len(starts):
                found.append(MatchRuns(length, self._runs(starts + length, depth)))
                counted += len(starts)
            longer = length
            length = max(length // 2, SHORTEST) if length > SHORTEST else 0
        return found

    def _longest(self, pattern: list[int]) -> int:
        """Return the length of the longest end of `pattern` that occurs in the corpus; 0 if it is below `SHORTEST`."""
        low, high = SHORTEST - 1, len(pattern)
        while low < high:  # every end of a sequence that occurs in the corpus occurs, too
            length = (low + high + 1) // 2
            if self._range(pattern[-length:]):
                low = length
            else:
                high = length - 1
        return low if low >= SHORTEST else 0

    def _range(self, pattern: list[int]) -> range:
        """Return the range in the suffix array of the suffixes that begin with `pattern`."""
        tokens, suffixes, length = self._store.tokens, self._store.suffixes, len(pattern)

        def beginning(start: np.uint32) -> list[int]:
            found: list[int] = tokens[int(start) : int(start) + length].tolist()
            return found

        first = bisect_left(suffixes, pattern, key=beginning)
        if first == len(suffixes) or beginning(suffixes[first]) != pattern:
            return range(first, first)
        return range(first, bisect_right(suffixes, pattern, first, key=beginning))

    def _sample(self, pattern: list[int], max_places: int) -> NDArray[np.int64]:
        """Return positions of `pattern`: all, or `max_places` of them, in the order of what follows: [<= most]."""
        places = self._range(pattern)
        count = min(len(places), max_places)
        chosen = places.start + np.arange(count) * len(places) // max(1, count)
        return self._store.suffixes[chosen].astype(np.int64)

    def _stand_behind(self, before: list[int], starts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return, for each position, whether the tokens `before` precede it: [starts]."""
        same: NDArray[np.bool_] = (self._at(starts[:, None] + np.arange(-len(before), 0)) == before).all(axis=1)
        return same & (starts >= len(before))

    def _runs(self, places: NDArray[np.int64], depth: int) -> list[MatchRun]:
        """Return what follows the positions, in order; neighbours with the same continuation are merged."""
        tokens = self._at(places[:, None] + np.arange(depth))
        ended = tokens >= self._store.vocabulary
        lengths = np.where(ended.any(axis=1), ended.argmax(axis=1), depth)
        first = np.flatnonzero(np.concatenate([[True], (tokens[1:] != tokens[:-1]).any(axis=1)]))
        times = np.diff(first, append=len(places))
        return [
            MatchRun(run[:length], count)
            for run, length, count in zip(tokens[first].tolist(), lengths[first].tolist(), times.tolist(), strict=True)
        ]

    def _at(self, positions: NDArray[np.int64]) -> NDArray[np.integer]:
        tokens = self._store.tokens
        return tokens[np.clip(positions, 0, len(tokens) - 1)]
