"""What a generation cost, and what speculation brought."""

from __future__ import annotations

import time

from outrider.core.contract import StepReport


class Figures:
    """Counts one generation. Times are in microseconds since the request arrived, on the monotonic clock."""

    def __init__(self) -> None:
        self._arrival = time.monotonic()
        self.completion_tokens = 0
        self.steps = 0
        self.verified = 0
        self.accepted = 0
        self.reached_by_depth: list[int] = []  # [depth - 1] steps whose accepted path reached that depth
        self.tried_by_depth: list[int] = []  # [depth - 1] steps that verified a node there
        self.wire_bytes = 0
        self.first_token_us = 0
        self.last_token_us = 0

    def observe(self, report: StepReport, tokens: int) -> None:
        """Takes one step and the number of the answer's tokens that came of it."""
        if tokens:
            self.last_token_us = self.elapsed_us()
            self.first_token_us = self.first_token_us or self.last_token_us
        self.completion_tokens += tokens
        self.steps += 1
        self.verified += report.verified
        self.accepted += report.accepted
        self.wire_bytes += report.wire_bytes
        _count(self.tried_by_depth, report.verified_depth)
        _count(self.reached_by_depth, report.accepted)
        if len(self.reached_by_depth) < len(self.tried_by_depth):
            self.reached_by_depth.extend([0] * (len(self.tried_by_depth) - len(self.reached_by_depth)))

    def elapsed_us(self) -> int:
        """Time since the request arrived."""
        return round((time.monotonic() - self._arrival) * 1e6)


def _count(depths: list[int], deepest: int) -> None:
    depths.extend([0] * (deepest - len(depths)))
    for depth in range(deepest):
        depths[depth] += 1
