"""A lossy rule: what is likely enough is accepted."""

from __future__ import annotations

import numpy as np

from outrider.core.rules.chance import Chance
from outrider.core.rules.rule import Drawn, Judge, Rows, Walk, accepted


class TypicalAcceptance:
    """A node is accepted if p(x) > min(epsilon, delta * exp(-H(p))): where the target is unsure, less will do. Of all
    accepted paths the longest counts, the likeliest of several. The token after it is drawn from p.

    Source: Medusa (Cai et al., arXiv 2401.10774), section 2.3.1. Lossy.
    """

    name = "typical-acceptance"
    drawn = Drawn.RANKED
    lossy = True
    chain = False

    def __init__(self, epsilon: float, delta: float) -> None:
        """The hard threshold and the factor of the one that follows the entropy; Medusa has delta = sqrt(epsilon)."""
        self._epsilon = epsilon
        self._delta = delta

    def walk(self, rows: Rows, judge: Judge, chance: Chance) -> Walk:
        """Visits every accepted node."""
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
                chance_of_it = float(p[rows.tokens[child]])
                if chance_of_it > threshold:
                    stack.append((likelihood + float(np.log(chance_of_it)), [*path, child]))
        path = best[2]
        return accepted(rows, judge, path, chance.pick(judge.p(path[-1] if path else 0)))
