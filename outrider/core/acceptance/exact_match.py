"""Rules that accept a node if and only if it is the target's token: lossless for any tree."""

from __future__ import annotations

from collections.abc import Callable

from outrider.core.acceptance.interface import ChildSampling, Judge, Rule, VerifiedRows, Walk
from outrider.core.acceptance.rng import RandomSource
from outrider.core.sampling.sampler import Choice


class SharedNoise(Rule):
    """The target's token is argmax(log p + g), whatever was drafted, and drafters know the noise g.

    At temperature 0 there is no noise, so the rule is exact greedy matching.

    Source: Daliri et al., "Coupling without Communication and Drafter-Invariant Speculative Decoding", arXiv
    2408.07978, for one candidate; here applied to whole trees.
    """

    name = "shared-noise"
    child_sampling = ChildSampling.FREELY

    def walk(self, rows: VerifiedRows, judge: Judge, rng: RandomSource) -> Walk:
        """Follow the target's own tokens. Only the rows of the accepted path are evaluated."""
        return _follow(rows, judge.choose)


class TargetMatch(Rule):
    """The target's token is drawn from p, by a draw that its position alone decides: the usual rule for trees of top
    tokens.

    Sources: SpecInfer (Miao et al., arXiv 2305.09781), section 4.3, "naive sampling"; EAGLE-2's usual implementation.
    """

    name = "target-match"
    child_sampling = ChildSampling.RANKED

    def walk(self, rows: VerifiedRows, judge: Judge, rng: RandomSource) -> Walk:
        """Follow tokens drawn from p."""
        return _follow(rows, lambda row: judge.choice_of(row, rng.pick(judge.p(row))))


def _follow(rows: VerifiedRows, choose_at: Callable[[int], Choice]) -> Walk:
    path: list[int] = []
    choices = [choose_at(0)]
    while True:
        below = rows.children[path[-1] if path else 0]
        row = next((row for row in below if rows.tokens[row] == choices[-1].token), None)
        if row is None:
            return Walk(path, choices)
        path.append(row)
        choices.append(choose_at(row))
