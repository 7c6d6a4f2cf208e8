"""The budget of a training, and its learning rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

FLOOR = 0.05  # final learning rate, as a share of the highest


@dataclass(frozen=True, slots=True)
class TrainingBudget:
    """The limits of a training. With both, the one that is reached first ends it."""

    tokens: int | None
    seconds: float | None

    def spent(self, tokens: int, seconds: float) -> float:
        """Return the share that is spent, from 0 to 1. With a limit on tokens alone, it does not depend on speed."""
        shares = [done / whole for done, whole in ((tokens, self.tokens), (seconds, self.seconds)) if whole is not None]
        return min(1.0, max(shares))

    def left(self, tokens: int, seconds: float) -> float:
        """Return the seconds until the budget is spent, at the speed so far; infinite before the first step."""
        by_tokens = by_time = math.inf
        if self.tokens is not None and tokens:
            by_tokens = (self.tokens - tokens) * seconds / tokens
        if self.seconds is not None:
            by_time = self.seconds - seconds
        return max(0.0, min(by_tokens, by_time))


def rate_factor(spent: float, warm_up: float) -> float:
    """Return the learning rate as a share of the highest: a ramp times a cosine to FLOOR.

    `spent`: the share of the budget that is spent; `warm_up`: the share in which the rate rises, from FLOOR.
    """
    ramp = min(1.0, FLOOR + spent / warm_up) if warm_up else 1.0
    return ramp * (FLOOR + (1.0 - FLOOR) * 0.5 * (1.0 + math.cos(math.pi * spent)))
