"""Rules that compare each drawn token's p with its q, from the root down."""

from __future__ import annotations

from outrider.core.acceptance.interface import ChildSampling, Judge, Rule, VerifiedRows, Walk, accepted_walk
from outrider.core.acceptance.rng import RandomSource
from outrider.core.sampling.filters import FloatRow


class RecursiveRejection(Rule):
    """A drawn child x is accepted with probability min(1, p(x) / q(x)). Otherwise p becomes the residual distribution
    norm(max(p - q, 0)), q loses x, and the next sibling is tried. The token after the path is drawn from the final p.

    Sources: speculative sampling for chains: Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv
    2302.01318, algorithm 2. Several children: SpecInfer (Miao et al., arXiv 2305.09781), algorithm 2, and without
    replacement Sequoia (Chen et al., arXiv 2402.12374), algorithm 2.
    """

    name = "recursive-rejection"
    child_sampling = ChildSampling.SAMPLED

    def walk(self, rows: VerifiedRows, judge: Judge, rng: RandomSource) -> Walk:
        """Go down from the root, child by child."""
        path: list[int] = []
        row: int | None = 0
        while row is not None:
            p, row = self._try_children(rows, judge, rng, row)
            if row is not None:
                path.append(row)
        return accepted_walk(rows, judge, path, rng.pick(p))

    def _try_children(
        self, rows: VerifiedRows, judge: Judge, rng: RandomSource, row: int
    ) -> tuple[FloatRow, int | None]:
        """Return the accepted child, or None, and the distribution p from which to draw a token in its place."""
        p = judge.p(row)
        if not rows.children[row]:
            return p, None
        q = judge.q(row).copy()
        for child in rows.children[row]:
            token = rows.tokens[child]
            if rng.happens(self._acceptance_probability(float(p[token]), float(q[token]))):
                return p, child
            p = residual(p, self._scaled(q))
            remove_token(q, token)
        return p, None

    def _acceptance_probability(self, p: float, q: float) -> float:
        return min(1.0, p / q)

    def _scaled(self, q: FloatRow) -> FloatRow:
        return q


class SpeculativeSampling(RecursiveRejection):
    """Recursive rejection for a chain, where no node has siblings."""

    name = "speculative-sampling"
    chain = True


class LenientSpeculativeSampling(SpeculativeSampling):
    """q is multiplied by a lenience l below 1 before it is compared with p: more tokens are accepted, and no token
    becomes more than 1 / l times as likely as under the target.

    Source: Leviathan et al., arXiv 2211.17192, appendix A.5. Lossy.
    """

    name = "lenient-speculative-sampling"

    def __init__(self, lenience: float) -> None:
        """`lenience` is above 0 and at most 1; 1 is lossless."""
        self._lenience = lenience

    def _acceptance_probability(self, p: float, q: float) -> float:
        return min(1.0, p / (self._lenience * q))

    def _scaled(self, q: FloatRow) -> FloatRow:
        return self._lenience * q


def residual(p: FloatRow, q: FloatRow) -> FloatRow:
    """Return norm(max(p - q, 0)): [vocabulary]; p itself where nothing is left, which happens with probability 0."""
    rest = (p - q).clip(min=0.0)
    total = rest.sum()
    return rest / total if total > 0.0 else p


def remove_token(q: FloatRow, token: int) -> None:
    """Remove a drawn token from q, in place, and renormalise the rest."""
    q[token] = 0.0
    total = q.sum()
    if total > 0.0:
        q /= total
