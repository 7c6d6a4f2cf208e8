"""Rules that accept a node if and only if it is the target's token: lossless for any tree."""

from __future__ import annotations

from collections.abc import Callable

from outrider.core.rules.chance import Chance
from outrider.core.rules.rule import Drawn, Judge, Rows, Walk
from outrider.core.sampler import Choice


class SharedNoise:
    """The target's token is argmax(log p + g), whatever was drafted, and drafters know g.

    Source: Daliri et al., "Coupling without Communication and Drafter-Invariant Speculative Decoding", arXiv
    2408.07978, for one candidate; here for whole trees. At temperature 0 there is no noise: exact greedy matching.
    """

    name = "shared-noise"
    drawn = Drawn.FREELY
    lossy = False
    chain = False

    def walk(self, rows: Rows, judge: Judge, chance: Chance) -> Walk:
        """Follows the target's own tokens; the judge is asked for the path's rows alone."""
        return _follow(rows, judge.choose)


class TargetMatch:
    """The target's token is drawn from p, with noise that drafters do not know; the usual rule for trees of top tokens.

    Sources: SpecInfer (Miao et al., arXiv 2305.09781), section 4.3, "naive sampling"; EAGLE-2's usual implementation.
    """

    name = "target-match"
    drawn = Drawn.RANKED
    lossy = False
    chain = False

    def walk(self, rows: Rows, judge: Judge, chance: Chance) -> Walk:
        """Follows tokens drawn from p."""
        return _follow(rows, lambda row: judge.said(row, chance.pick(judge.p(row))))


def _follow(rows: Rows, choose_at: Callable[[int], Choice]) -> Walk:
    path: list[int] = []
    choices = [choose_at(0)]
    while True:
        below = rows.children[path[-1] if path else 0]
        row = next((row for row in below if rows.tokens[row] == choices[-1].token), None)
        if row is None:
            return Walk(path, choices)
        path.append(row)
        choices.append(choose_at(row))
