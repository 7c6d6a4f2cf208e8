"""A lossy rule that accepts every token that is likely enough."""

from __future__ import annotations

import numpy as np

from outrider.core.acceptance.interface import ChildSampling, Judge, Rule, VerifiedRows, Walk, accepted_walk
from outrider.core.acceptance.rng import RandomSource


class TypicalAcceptance(Rule):
    """A node is accepted if p(x) > min(epsilon, delta * exp(-H(p))): the higher the target's entropy H, the lower the
    threshold. The longest accepted path is committed, the likeliest of several; the token after it is drawn from p.

    Source: Medusa (Cai et al., arXiv 2401.10774), section 2.3.1. Lossy.
    """

    name = "typical-acceptance"
    child_sampling = ChildSampling.RANKED

    def __init__(self, epsilon: float, delta: float) -> None:
        """`epsilon` is the upper threshold, `delta` the factor of the entropy's; Medusa uses delta = sqrt(epsilon)."""
        self._epsilon = epsilon
        self._delta = delta

    def walk(self, rows: VerifiedRows, judge: Judge, rng: RandomSource) -> Walk:
        """Visit every accepted node."""
        best: tuple[int, float, list[int]] = (0, 0.0, [])
        stack: list[tuple[float, list[int]]] = [(0.0, [])]
        while stack:
            likelihood, path = stack.pop()
            best = max(best, (len(path), likelihood, path), key=lambda found: found[:2])
            row = path[-1] if path else 0
            if not rows.children[row]:
                continue
            p = judge.p(row)
            present = p[p > 0.0]
            entropy = -float((present * np.log(present)).sum())
            threshold = min(self._epsilon, self._delta * float(np.exp(-entropy)))
            for child in rows.children[row]:
                probability = float(p[rows.tokens[child]])
                if probability > threshold:
                    stack.append((likelihood + float(np.log(probability)), [*path, child]))
        path = best[2]
        return accepted_walk(rows, judge, path, rng.pick(judge.p(path[-1] if path else 0)))
