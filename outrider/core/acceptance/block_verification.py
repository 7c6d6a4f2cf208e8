"""Rules that test a whole path at once, from its leaf up, and so accept more tokens than tests token by token."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outrider.core.acceptance.interface import ChildSampling, Judge, Rule, VerifiedRows, Walk, accepted_walk
from outrider.core.acceptance.rejection import remove_token
from outrider.core.acceptance.rng import RandomSource
from outrider.core.sampling.filters import FloatRow


class _Verdict(NamedTuple):
    path: list[int]  # accepted rows, from the last one up
    p: FloatRow  # of the token after them


class TraversalVerification(Rule):
    """Visits leaves first. With alpha(root) = 1 and alpha(child) = min(1, alpha(parent) p / q), a leaf is accepted,
    with its whole path, with probability alpha. A rejected leaf is removed; at its parent, p becomes norm(max(alpha p -
    q, 0)), q loses the token, and alpha becomes S / (S + 1 - alpha), where S is the sum of max(alpha p - q, 0).

    Source: Weng et al., "Traversal Verification for Speculative Tree Decoding", arXiv 2505.12398, algorithm 1.
    """

    name = "traversal-verification"
    child_sampling = ChildSampling.SAMPLED

    def walk(self, rows: VerifiedRows, judge: Judge, rng: RandomSource) -> Walk:
        """Visit nodes until one is accepted; the root always is."""
        found = self._visit(rows, judge, rng, 0, 1.0)
        assert found is not None
        return accepted_walk(rows, judge, found.path[::-1], rng.pick(found.p))

    def _visit(self, rows: VerifiedRows, judge: Judge, rng: RandomSource, row: int, alpha: float) -> _Verdict | None:
        if alpha <= 0.0:
            return None
        p = judge.p(row)
        children = rows.children[row]
        q = judge.q(row).copy() if children else np.empty(0)
        for child in children:
            token = rows.tokens[child]
            found = self._visit(rows, judge, rng, child, min(1.0, alpha * float(p[token]) / float(q[token])))
            if found is not None:
                return _Verdict([*found.path, child], found.p)
            rest = (alpha * p - q).clip(min=0.0)
            total = float(rest.sum())
            if total <= 0.0:  # q covers all of alpha p: nothing is left to accept here,
                alpha = float(alpha >= 1.0)  # unless p and q are equal and rounding rejected the child
                break
            p, alpha = rest / total, total / (total + (1.0 - alpha))
            remove_token(q, token)
        return _Verdict([], p) if rng.happens(alpha) else None


class BlockVerification(TraversalVerification):
    """Traversal verification of a chain: the longest prefix that a joint test accepts is kept.

    Source: Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444, algorithm 2, which is
    equivalent to traversal verification of a tree that is a chain.
    """

    name = "block-verification"
    chain = True
