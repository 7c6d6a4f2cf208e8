"""What a generation used, and what speculation saved."""

from __future__ import annotations

import json
import time
from typing import Any

from outrider.core.session.contract import StepReport
from outrider.core.session.speculation_status import SpeculationTally
from outrider.store.redis.client import decoding

_COUNTERS = ("steps", "verified", "accepted", "reached_by_depth", "tried_by_depth", "wire_bytes")
_TIMES = ("first_token_us", "last_token_us")


class UsageStats:
    """Counts one generation. Times are in microseconds since the request arrived, on the monotonic clock.

    A generation that is taken over continues from its last owner's counts; the time in between does not count.
    """

    def __init__(self, record: str = "") -> None:
        """`record`: the result of `dump` at the generation's last owner; empty for a new generation."""
        self._arrival = time.monotonic()
        self.completion_tokens = 0
        self.reasoning_tokens = 0  # of these, up to the end mark of reasoning
        self.steps = 0
        self.verified = 0
        self.accepted = 0
        self.reached_by_depth: list[int] = []  # [depth - 1] steps whose accepted path reached that depth
        self.tried_by_depth: list[int] = []  # [depth - 1] steps that verified a node there
        self.wire_bytes = 0
        self.first_token_us = 0
        self.last_token_us = 0
        self.speculation = SpeculationTally()
        if record:
            with decoding("a generation's usage"):
                values: dict[str, Any] = json.loads(record)
                self._arrival -= values["elapsed_us"] / 1e6
                for name in (*_COUNTERS, *_TIMES):
                    setattr(self, name, values[name])
                self.speculation.load(values.get("speculation", {}))  # missing in records of older routers

    def add_wait(self, seconds: float) -> None:
        """Add seconds between the request's arrival and the start of this count."""
        self._arrival -= seconds

    def dump(self) -> str:
        """Return the text to store when the generation ends or is released."""
        return json.dumps(
            {name: getattr(self, name) for name in (*_COUNTERS, *_TIMES)}
            | {"elapsed_us": self.elapsed_us(), "speculation": self.speculation.dump()}
        )

    def add_replayed(self, tokens: int) -> None:
        """Count tokens that came from the log."""
        self.completion_tokens += tokens

    def observe(self, report: StepReport, tokens: int) -> None:
        """Count one step, and the number of the response's tokens that came of it."""
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
        """Return the microseconds since the request arrived."""
        return round((time.monotonic() - self._arrival) * 1e6)


def _count(depths: list[int], deepest: int) -> None:
    depths.extend([0] * (deepest - len(depths)))
    for depth in range(deepest):
        depths[depth] += 1
