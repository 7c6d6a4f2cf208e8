"""Rules that hold each drawn token's p against its q, from the root down."""

from __future__ import annotations

from outrider.core.filters import FloatRow
from outrider.core.rules.chance import Chance
from outrider.core.rules.rule import Drawn, Judge, Rows, Walk, accepted


class RecursiveRejection:
    """A drawn child x is accepted with probability min(1, p(x) / q(x)). Otherwise p becomes what q did not cover,
    norm(max(p - q, 0)), q loses x, and the next sibling is tried; at the end the token is drawn from that p.

    Sources: speculative sampling for chains: Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv
    2302.01318, algorithm 2. Several children: SpecInfer (Miao et al., arXiv 2305.09781), algorithm 2, and without
    replacement Sequoia (Chen et al., arXiv 2402.12374), algorithm 2.
    """

    name = "recursive-rejection"
    drawn = Drawn.SAMPLED
    lossy = False
    chain = False

    def walk(self, rows: Rows, judge: Judge, chance: Chance) -> Walk:
        """Goes down from the root, child by child."""
        path: list[int] = []
        row: int | None = 0
        while row is not None:
            p, row = self._try_children(rows, judge, chance, row)
            if row is not None:
                path.append(row)
        return accepted(rows, judge, path, chance.pick(p))

    def _try_children(self, rows: Rows, judge: Judge, chance: Chance, row: int) -> tuple[FloatRow, int | None]:
        """The child that is accepted, if any, and else the p of what is said instead."""
        p = judge.p(row)
        if not rows.children[row]:
            return p, None
        q = judge.q(row).copy()
        for child in rows.children[row]:
            token = rows.tokens[child]
            if chance.happens(self._chance(float(p[token]), float(q[token]))):
                return p, child
            p = uncovered(p, self._held(q))
            without(q, token)
        return p, None

    def _chance(self, p: float, q: float) -> float:
        return min(1.0, p / q)

    def _held(self, q: FloatRow) -> FloatRow:
        return q


class SpeculativeSampling(RecursiveRejection):
    """The same for a chain, where there are no siblings."""

    name = "speculative-sampling"
    chain = True


class LenientSpeculativeSampling(SpeculativeSampling):
    """q is multiplied by a lenience l below 1 before it is held against p: more is accepted, and no token becomes more
    than 1 / l times as likely as the target has it.

    Source: Leviathan et al., arXiv 2211.17192, appendix A.5. Lossy.
    """

    name = "lenient-speculative-sampling"
    lossy = True

    def __init__(self, lenience: float) -> None:
        """`lenience`: above 0 and at most 1; 1 is lossless."""
        self._lenience = lenience

    def _chance(self, p: float, q: float) -> float:
        return min(1.0, p / (self._lenience * q))

    def _held(self, q: FloatRow) -> FloatRow:
        return self._lenience * q


def uncovered(p: FloatRow, q: FloatRow) -> FloatRow:
    """norm(max(p - q, 0)); p itself where nothing is left, which happens with probability 0."""
    rest = (p - q).clip(min=0.0)
    total = rest.sum()
    return rest / total if total > 0.0 else p


def without(q: FloatRow, token: int) -> None:
    """q, in place, once `token` was drawn: the rest in proportion."""
    q[token] = 0.0
    total = q.sum()
    if total > 0.0:
        q /= total
