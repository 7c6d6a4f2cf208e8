"""The interface of acceptance rules, which take a verified tree and return the tokens to commit."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from outrider.core.acceptance.rng import RandomSource
from outrider.core.sampling.filters import FloatRow
from outrider.core.sampling.sampler import Choice


class ChildSampling(Enum):
    """How drafters must choose a node's children under a rule."""

    FREELY = "freely"  # any tree is allowed; children are best by log q + g, because the noise is shared
    RANKED = "ranked"  # any tree is allowed; children are best by q, because the noise is not shared
    SAMPLED = "sampled"  # without replacement from a q that is sent along, in a tree whose shape ignores the draws


class VerifiedRows:
    """A verified tree. Row 0 is its root; a row's children stand in the order in which they were drawn."""

    def __init__(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """parents[i] is the parent row of row i, tokens[i] its token; the entries of row 0 are ignored."""
        self.tokens = tokens
        self.children: list[list[int]] = [[] for _ in tokens]
        for row in range(1, len(tokens)):
            self.children[parents[row]].append(row)


class Judge(Protocol):
    """The models' results after each row. A rule calls it only for the rows that it needs."""

    def choose(self, row: int) -> Choice:
        """Return the target's token under shared noise."""

    def p(self, row: int) -> FloatRow:
        """Return the target's distribution after all filters: [vocabulary], sum 1."""

    def q(self, row: int) -> FloatRow:
        """Return the distribution from which the row's children were drawn: [vocabulary], sum 1."""

    def choice_of(self, row: int, token: int) -> Choice:
        """Return the choice of a token that the rule itself selected after that row; its gap is unknown (NaN)."""


class Walk(NamedTuple):
    """The outcome of one verified tree."""

    path: list[int]  # rows of the accepted nodes, from the root's child down
    choices: list[Choice]  # the committed tokens: one for each accepted node, and the bonus


class Rule(Protocol):
    """An acceptance rule."""

    name: str
    child_sampling: ChildSampling
    chain: bool = False  # whether the rule is for a single drafted path

    def walk(self, rows: VerifiedRows, judge: Judge, rng: RandomSource) -> Walk:
        """Return the accepted path and the committed tokens: those of the path, and one token after it."""


def accepted_walk(rows: VerifiedRows, judge: Judge, path: Sequence[int], last: int) -> Walk:
    """Return the walk that accepts the tokens of `path` and commits `last` after them."""
    choices = [judge.choice_of(above, rows.tokens[row]) for above, row in zip([0, *path], path, strict=False)]
    return Walk([*path], [*choices, judge.choice_of(path[-1] if path else 0, last)])
