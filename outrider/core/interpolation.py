"""How much to believe what followed before: by how long the match was, how often it stood there, and whether the same
token followed each time.

Interpolation with learned weights (Jelinek and Mercer, 1980). A match gives a token the share of its belief that the
token has among what followed there. The rest of the belief is left to shorter matches, and what the shortest leaves
belongs to tokens that never followed. A place counts once, for the longest match that it has: counted again for the
shorter ones, one piece of evidence would be believed many times.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from outrider.core.continuations import Branch

LONGEST = 16  # tokens; longer matches are believed no more
OFTEN = 16  # places; more are believed no more
DOUBT = 4.0  # at first, a match of so many tokens is believed half when it stood once
PRIOR = 4.0  # observations' worth of trust in that
MEMORY = 0.99  # weight of the past at each observation
UNSEEN = 1 / 4096  # chance of a token that never followed


class Run(NamedTuple):
    """What followed at some places."""

    tokens: Sequence[int]  # it may be none
    times: int  # places


class Runs(NamedTuple):
    """What followed the places whose match is of one length."""

    matched: int  # tokens, at least 1
    followed: Sequence[Run]


class Interpolation:
    """The weights of matches, learned from what came."""

    def __init__(self) -> None:
        self._credits: dict[tuple[int, int, bool], tuple[float, float]] = {}  # by class: what was earned, of how much

    def weight(self, length: int, count: int, tokens: int) -> float:
        """The share of the belief that is due to a match, 0 to 1.

        It is `length` tokens long and stood at `count` places, which `tokens` different tokens followed.
        """
        earned, of = self._credit(_class(length, count, tokens))
        return earned / of

    def observe(self, found: Sequence[Runs], token: int) -> None:
        """`token` came where `found` was found, the longest matches first.

        A step of expectation maximisation: each match earns the part of the token's chance that was its own, so that a
        long match which says no more than shorter ones do earns little.
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
            earned, of = self._credit(kind)
            own = earned / of * times[token] / count
            chance = own + (1.0 - earned / of) * chance
            self._credits[kind] = MEMORY * earned + own / chance, MEMORY * of + 1.0

    def _credit(self, kind: tuple[int, int, bool]) -> tuple[float, float]:
        length, count, _ = kind
        return self._credits.get(kind) or (PRIOR * count / (count + DOUBT / length), PRIOR)


class Followers:
    """The counted trie of what followed the places that match a text's end. It is built as it is looked into."""

    def __init__(self, found: Sequence[Runs], interpolation: Interpolation, passed: int = 0) -> None:
        """`found` has the longest matches first; the first `passed` tokens of its runs lead here."""
        self._found = found
        self._interpolation = interpolation
        self._passed = passed

    def children(self) -> Iterator[Branch]:
        """What may come next. A place from which all came true so far matches by so many tokens more."""
        passed = self._passed
        left = 1.0
        chances: defaultdict[int, float] = defaultdict(float)
        below: defaultdict[int, list[Runs]] = defaultdict(list)
        for matched, followed in self._found:
            same: defaultdict[int, list[Run]] = defaultdict(list)
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
                below[token].append(Runs(matched, runs))
        for token, chance in chances.items():
            yield Branch(token, chance, Followers(below[token], self._interpolation, passed + 1))


def _class(length: int, count: int, tokens: int) -> tuple[int, int, bool]:
    """Matches of one class are believed alike. `count` is rounded down to a power of two."""
    return min(length, LONGEST), min(1 << count.bit_length() - 1, OFTEN), tokens == 1
