"""What an acceptance rule is: from a verified tree to the tokens to commit."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from outrider.core.filters import FloatRow
from outrider.core.rules.chance import Chance
from outrider.core.sampler import Choice


class Drawn(Enum):
    """How drafters must choose a node's children for a rule."""

    FREELY = "freely"  # any tree will do; what is likely best is best by log q + g, the noise being shared
    RANKED = "ranked"  # likewise, but the noise is not shared: best by q
    SAMPLED = "sampled"  # without replacement from a q that goes with them, in a tree whose shape ignores the draws


class Rows:
    """A verified tree. Row 0 is its root; a row's children come in the order in which they were drawn."""

    def __init__(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """parents[i] is the row that row i follows, tokens[i] its token; those of row 0 do not matter."""
        self.tokens = tokens
        self.children: list[list[int]] = [[] for _ in tokens]
        for row in range(1, len(tokens)):
            self.children[parents[row]].append(row)


class Judge(Protocol):
    """What the models say after each row. It is asked for the rows that a rule looks at alone."""

    def choose(self, row: int) -> Choice:
        """The target's token under shared noise."""

    def p(self, row: int) -> FloatRow:
        """The target's distribution after all filters: [vocabulary], sum 1."""

    def q(self, row: int) -> FloatRow:
        """The distribution that the row's children were drawn from: [vocabulary], sum 1."""

    def said(self, row: int, token: int) -> Choice:
        """A token that was chosen after that row by a rule's own ways; its gap is not known (NaN)."""


class Walk(NamedTuple):
    """What one verified tree commits."""

    path: list[int]  # rows of the accepted nodes, from the root's child down
    choices: list[Choice]  # the committed tokens: one for each accepted node, and one more


class Rule(Protocol):
    """An acceptance rule."""

    name: str
    drawn: Drawn
    lossy: bool  # whether the text is not distributed as the target's own
    chain: bool  # whether it is for a single path of drafts

    def walk(self, rows: Rows, judge: Judge, chance: Chance) -> Walk:
        """The accepted path, and the token after it: the bonus where the tree ends, else the one that corrects it."""


def accepted(rows: Rows, judge: Judge, path: Sequence[int], last: int) -> Walk:
    """The walk that accepts the tokens of `path`, and says `last` after them."""
    said = [judge.said(above, rows.tokens[row]) for above, row in zip([0, *path], path, strict=False)]
    return Walk([*path], [*said, judge.said(path[-1] if path else 0, last)])
