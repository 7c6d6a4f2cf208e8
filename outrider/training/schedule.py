"""How long a training takes, and how fast it learns when."""

from __future__ import annotations

import math
from dataclasses import dataclass

FLOOR = 0.05  # of the learning rate at its highest, at the end


@dataclass(frozen=True, slots=True)
class Budget:
    """What a training may take. With both, what is spent first ends it."""

    tokens: int | None
    seconds: float | None

    def spent(self, tokens: int, seconds: float) -> float:
        """The share of it, from 0 to 1. By tokens alone it is the same however fast the machine is."""
        shares = [done / whole for done, whole in ((tokens, self.tokens), (seconds, self.seconds)) if whole is not None]
        return min(1.0, max(shares))

    def left(self, tokens: int, seconds: float) -> float:
        """Seconds until it is spent, at the pace so far; infinite before there is one."""
        by_tokens = by_time = math.inf
        if self.tokens is not None and tokens:
            by_tokens = (self.tokens - tokens) * seconds / tokens
        if self.seconds is not None:
            by_time = self.seconds - seconds
        return max(0.0, min(by_tokens, by_time))


def pace(step: int, spent: float, warm_up: int) -> float:
    """The learning rate of a step, counted from 0, as a share of the highest: a ramp, times a cosine down to FLOOR."""
    ramp = min(1.0, (step + 1) / warm_up) if warm_up else 1.0
    return ramp * (FLOOR + (1.0 - FLOOR) * 0.5 * (1.0 + math.cos(math.pi * spent)))
