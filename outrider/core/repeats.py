"""Where a text repeats itself: what followed the last time is likely to follow again. It takes no model.

Sources: prompt lookup decoding (Saxena, 2023); SuffixDecoding (Oliaro et al., arXiv 2411.04975), from which comes the
idea that the length of the match says how much to believe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SHORTEST = 2  # tokens that must match
LONGEST = 16  # longer matches say no more
REMEMBERED = 8  # latest places of each pair of tokens that are looked at
MEMORY = 0.98  # weight of the past at each observation
RATE = 1.0  # of learning the bonus
PRIOR = 2.0  # observations' worth of trust in what is said before anything was seen


class Repeat(NamedTuple):
    """A repetition: the text's last `length` tokens stand before, and `tokens` followed there."""

    length: int
    tokens: list[int]


class Repeats:
    """An index over one session's tokens. Adding a token takes constant time."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._places: dict[tuple[int, int], list[int]] = {}  # a pair of tokens -> what followed it, by position
        self.extend(tokens)

    @property
    def length(self) -> int:
        """Tokens that it has read."""
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        for token in tokens:
            if len(self._tokens) >= SHORTEST:
                pair = self._tokens[-2], self._tokens[-1]
                places = self._places.get(pair)
                if places is None:
                    self._places[pair] = [len(self._tokens)]
                else:
                    places.append(len(self._tokens))
            self._tokens.append(token)

    def keep(self, tokens: Sequence[int]) -> None:
        """The text has become another one: forgets all from the first token on that differs. Where that is more than
        half, forgets all, which takes less time."""
        both = min(len(tokens), len(self._tokens))
        same = next((place for place in range(both) if tokens[place] != self._tokens[place]), both)
        if same < len(self._tokens) / 2:
            self._tokens, self._places = [], {}
        while len(self._tokens) > same:
            self._tokens.pop()
            if len(self._tokens) >= SHORTEST:
                self._places[self._tokens[-2], self._tokens[-1]].pop()

    def find(self, most: int, path: Sequence[int] = ()) -> Repeat | None:
        """What followed the longest earlier match of the text's end, the latest of several: at most `most` tokens.
        With a `path`, of the text's end if these tokens followed.

        Where the match reaches into its own continuation, a loop, that goes round. None: nothing matches.
        """
        text = [*self._tokens, *path] if path else self._tokens
        if len(text) < SHORTEST:
            return None
        best, found = 0, 0
        for place in self._places.get((text[-2], text[-1]), [])[: -REMEMBERED - 1 : -1]:
            length = SHORTEST
            while length < min(LONGEST, place) and text[place - 1 - length] == text[-1 - length]:
                length += 1
            if length > best:
                best, found = length, place
        if not best:
            return None
        period = len(text) - found
        return Repeat(best, [text[found + step % period] for step in range(most)])


class Hint(NamedTuple):
    """What may follow a node because it followed before."""

    token: int
    length: int  # of the match


class RepeatFit:
    """What repetitions are worth by the length of the match, learned from what the target said."""

    def __init__(self) -> None:
        self._hits = [PRIOR * length / (length + 2) for length in range(LONGEST + 1)]
        self._seen = [PRIOR] * (LONGEST + 1)
        self._bonus = np.zeros(2)  # of any match, and for its length

    def chance(self, length: int) -> float:
        """That the next token of a match of `length` tokens is the target's, as far as no model has judged it."""
        length = min(length, LONGEST)
        return self._hits[length] / self._seen[length]

    def bonus(self, length: int) -> float:
        """By how much a match raises the logarithm of the odds that a model gives a token. It grows with the length."""
        return float(self._bonus @ _features(length))

    def observe(self, length: int, hit: bool) -> None:
        """A match of `length` tokens was right about the token that followed, or not."""
        length = min(length, LONGEST)
        self._hits[length] = MEMORY * self._hits[length] + hit
        self._seen[length] = MEMORY * self._seen[length] + 1.0

    def correct(self, length: int, hit: bool, believed: float) -> None:
        """The same where the model had another favourite, and the match's token was believed with that chance, the
        bonus included: a step up the likelihood. Where both name one token, nobody learns who is to be believed."""
        self._bonus += RATE * (hit - believed) * _features(length)


def _features(length: int) -> NDArray[np.float64]:
    return np.array([1.0, 2.0 * min(length, LONGEST) / LONGEST])
