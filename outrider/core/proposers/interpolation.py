"""Probabilities of the tokens that followed earlier matches, by the length and the number of matches and by whether the
same token followed each time.

Interpolation with learned weights (Jelinek and Mercer, 1980). A match distributes its weight among the tokens that
followed it, in proportion to their counts. The remaining probability goes to shorter matches, and what the shortest
leaves goes to tokens that never followed. A position counts once, for its longest match: otherwise the same evidence
would count several times.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from outrider.core.proposers.ngram_tree import Branch
from outrider.core.stats import LONG, FadingRatio

LONGEST = 16  # tokens; longer matches are treated as this long
OFTEN = 16  # positions; more matching positions are treated as this many
DOUBT = 4.0  # length in tokens at which a match at a single position has the initial weight 1/2
PRIOR = 4.0  # observations that the initial weight counts as
UNSEEN = 1 / 4096  # probability of a token that never followed


class MatchRun(NamedTuple):
    """The same tokens that followed at several positions."""

    tokens: Sequence[int]  # may be empty
    times: int  # number of positions


class MatchRuns(NamedTuple):
    """The tokens that followed at all positions whose match has one length."""

    matched: int  # tokens, at least 1
    followed: Sequence[MatchRun]


class Interpolation:
    """The weights of matches, learned from the tokens that the target chose."""

    def __init__(self) -> None:
        self._credits: dict[tuple[int, int, bool], FadingRatio] = {}  # by class: credit earned, of what was possible

    def weight(self, length: int, count: int, tokens: int) -> float:
        """Return the weight of a match, 0 to 1.

        The match has `length` tokens and `count` positions, which `tokens` different tokens followed.
        """
        return self._credit(_class(length, count, tokens)).ratio

    def observe(self, found: Sequence[MatchRuns], token: int) -> None:
        """Learn that the target chose `token` where the matches `found`, longest first, were found.

        This is a step of expectation maximisation: each match earns the part of the token's probability that it
        contributed, so that a long match that adds nothing to shorter ones earns little.
        """
        chance = UNSEEN
        for matched, followed in reversed(found):
            times: Counter[int] = Counter()
            for run in followed:
                if run.tokens:
                    times[run.tokens[0]] += run.times
            count = times.total()
            if not count:
                continue
            kind = _class(matched, count, len(times))
            credit = self._credits[kind] = self._credit(kind)
            contribution = credit.ratio * times[token] / count
            chance = contribution + (1.0 - credit.ratio) * chance
            credit.observe(contribution / chance)

    def _credit(self, kind: tuple[int, int, bool]) -> FadingRatio:
        length, count, _ = kind
        known = self._credits.get(kind)
        return known or FadingRatio(LONG, hits=PRIOR * count / (count + DOUBT / length), attempts=PRIOR)


class MatchTrie:
    """The trie, with counts, of the tokens that followed the matches of a text's end. Nodes are built on demand."""

    def __init__(self, found: Sequence[MatchRuns], interpolation: Interpolation, passed: int = 0) -> None:
        """`found` has the longest matches first; the first `passed` tokens of its runs are the path to this node."""
        self._found = found
        self._interpolation = interpolation
        self._passed = passed

    def children(self) -> Iterator[Branch]:
        """Yield the tokens that may follow. Below the top, the matched length grows by the depth of this node."""
        passed = self._passed
        left = 1.0
        chances: defaultdict[int, float] = defaultdict(float)
        below: defaultdict[int, list[MatchRuns]] = defaultdict(list)
        for matched, followed in self._found:
            same: defaultdict[int, list[MatchRun]] = defaultdict(list)
            times: defaultdict[int, int] = defaultdict(int)
            for run in followed:
                if len(run.tokens) > passed:
                    token = run.tokens[passed]
                    same[token].append(run)
                    times[token] += run.times
            if not same:
                continue
            count = sum(times.values())
            share = left * self._interpolation.weight(matched + passed, count, len(same))
            left -= share
            for token, runs in same.items():
                chances[token] += share * times[token] / count
                below[token].append(MatchRuns(matched, runs))
        for token, chance in chances.items():
            yield Branch(token, chance, MatchTrie(below[token], self._interpolation, passed + 1))


def _class(length: int, count: int, tokens: int) -> tuple[int, int, bool]:
    """Return the class of a match; matches of one class share a weight. `count` is rounded down to a power of two."""
    return min(length, LONGEST), min(1 << count.bit_length() - 1, OFTEN), tokens == 1
