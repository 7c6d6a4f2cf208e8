"""The best tokens of a row of logits, from the engine where it has chosen them, else from the logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.core.construction.expansion import CANDIDATES, Candidates
from outrider.core.sampling.sampler import Sampler
from outrider.engine.interface.logits import BestTokens, LogitsRow


def row_candidates(row: LogitsRow, sampler: Sampler, path: Sequence[int], usable: int, *, noised: bool) -> Candidates:
    """Return the best tokens after a path. `usable`: only ids below it; `noised`: with the noise of the sampler."""
    best = row.best
    known = None if best is None else known_candidates(best, usable)
    if known is not None:
        return known
    return Candidates(*sampler.leading(row.logits[:usable], path, CANDIDATES, noised=noised))


def known_candidates(best: BestTokens, usable: int) -> Candidates | None:
    """Drop padding from an engine's candidates. Return None if nothing is left."""
    known = np.isfinite(best.scores) & (best.tokens < usable)
    return Candidates(best.tokens[known], best.scores[known]) if known.any() else None
