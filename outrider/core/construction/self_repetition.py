"""Repetitions within one text: the tokens that followed an earlier match are likely to follow again. No model is used.

Sources: prompt lookup decoding (Saxena, 2023); SuffixDecoding (Oliaro et al., arXiv 2411.04975), which introduced the
length of the match as a measure of confidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.core.stats import FadingRatio

SHORTEST = 2  # tokens that must match
LONGEST = 16  # tokens; longer matches are treated as this long
REMEMBERED = 8  # latest positions of each pair of tokens that are compared
RATE = 1.0  # learning rate of the bonus
PRIOR = 2.0  # observations that the initial probabilities count as


class Repeat(NamedTuple):
    """A repetition: the text's last `length` tokens occur earlier, and `tokens` followed there."""

    length: int
    tokens: list[int]


class Repeats:
    """An index over one session's tokens. Adding a token takes constant time."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._places: dict[tuple[int, int], list[int]] = {}  # a pair of tokens -> positions of the token after it
        self.extend(tokens)

    @property
    def length(self) -> int:
        """The number of tokens in the index."""
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
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
        """Forget all tokens from the first one that differs from `tokens`. Where that is more than half, forget all,
        which takes less time."""
        both = min(len(tokens), len(self._tokens))
        same = next((place for place in range(both) if tokens[place] != self._tokens[place]), both)
        if same < len(self._tokens) / 2:
            self._tokens, self._places = [], {}
        while len(self._tokens) > same:
            self._tokens.pop()
            if len(self._tokens) >= SHORTEST:
                self._places[self._tokens[-2], self._tokens[-1]].pop()

    def find(self, max_tokens: int, path: Sequence[int] = ()) -> Repeat | None:
        """Return what followed the longest earlier match of the text's end, the latest of several: `max_tokens` tokens.

        With a `path`, the text's end is taken as if these tokens followed it. Where the match overlaps its own
        continuation, the text is in a loop, and the loop is repeated. Return None where nothing matches.
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
        return Repeat(best, [text[found + step % period] for step in range(max_tokens)])


class Hint(NamedTuple):
    """A token that may follow a node because it followed an earlier match."""

    token: int
    length: int  # of the match


class RepeatFit:
    """The probability that a repetition is right, by the length of the match, learned from the target's tokens."""

    def __init__(self) -> None:
        self._rates = [FadingRatio(hits=PRIOR * length / (length + 2), attempts=PRIOR) for length in range(LONGEST + 1)]
        self._bonus = np.zeros(2)  # a constant for any match, and a factor for its length

    def chance(self, length: int) -> float:
        """Return the probability that the token after a match of `length` tokens is the target's, if no model has
        scored the token."""
        return self._rates[min(length, LONGEST)].ratio

    def bonus(self, length: int) -> float:
        """Return by how much a match of `length` tokens raises the log-odds that a model gives the token."""
        return float(self._bonus @ _features(length))

    def observe(self, length: int, hit: bool) -> None:
        """Record whether the token after a match of `length` tokens was the target's."""
        self._rates[min(length, LONGEST)].observe(hit)

    def correct(self, length: int, hit: bool, predicted: float) -> None:
        """Adjust the bonus by one step of gradient ascent on the likelihood, where the model preferred another token.

        `predicted` is the probability of the match's token with the bonus. Positions where the model and the match
        prefer the same token teach nothing about the bonus.
        """
        self._bonus += RATE * (hit - predicted) * _features(length)


def _features(length: int) -> NDArray[np.float64]:
    return np.array([1.0, 2.0 * min(length, LONGEST) / LONGEST])
