"""Rules that judge a path as a whole, from its leaf up, and so accept more than token by token."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outrider.core.filters import FloatRow
from outrider.core.rules.chance import Chance
from outrider.core.rules.rejection import without
from outrider.core.rules.rule import Drawn, Judge, Rows, Walk, accepted


class _Verdict(NamedTuple):
    path: list[int]  # accepted rows, from the last one up
    p: FloatRow  # of the token after them


class TraversalVerification:
    """Leaves first: with alpha(root) = 1 and alpha(child) = min(1, alpha(parent) p / q), a leaf is accepted, with its
    whole path, with probability alpha. Where it is not, it goes; of its parent, p becomes norm(max(alpha p - q, 0)), q
    loses the token, and alpha becomes S / (S + 1 - alpha), S being the sum of max(alpha p - q, 0).

    Source: Weng et al., "Traversal Verification for Speculative Tree Decoding", arXiv 2505.12398, algorithm 1.
    """

    name = "traversal-verification"
    drawn = Drawn.SAMPLED
    lossy = False
    chain = False

    def walk(self, rows: Rows, judge: Judge, chance: Chance) -> Walk:
        """Visits every node until one is accepted; the root always is."""
        found = self._visit(rows, judge, chance, 0, 1.0)
        assert found is not None
        return accepted(rows, judge, found.path[::-1], chance.pick(found.p))

    def _visit(self, rows: Rows, judge: Judge, chance: Chance, row: int, alpha: float) -> _Verdict | None:
        if alpha <= 0.0:
            return None
        p = judge.p(row)
        children = rows.children[row]
        q = judge.q(row).copy() if children else np.empty(0)
        for child in children:
            token = rows.tokens[child]
            found = self._visit(rows, judge, chance, child, min(1.0, alpha * float(p[token]) / float(q[token])))
            if found is not None:
                return _Verdict([*found.path, child], found.p)
            rest = (alpha * p - q).clip(min=0.0)
            total = float(rest.sum())
            if total <= 0.0:  # what was drafted covers all of alpha p: nothing is left to be accepted here,
                alpha = float(alpha >= 1.0)  # unless p and q are the same, and rounding rejected the child
                break
            p, alpha = rest / total, total / (total + (1.0 - alpha))
            without(q, token)
        return _Verdict([], p) if chance.happens(alpha) else None


class BlockVerification(TraversalVerification):
    """The same for a chain: the longest prefix is kept that a joint test accepts.

    Source: Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444, algorithm 2, of which
    the traversal of a tree that is a chain is another way to put it.
    """

    name = "block-verification"
    chain = True
