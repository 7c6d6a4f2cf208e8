"""The links between drafter and verifier that the suite distance compares."""

from __future__ import annotations

import math
from typing import NamedTuple

from bench.faults import FaultProxy
from outrider.errors import ConfigError


class Link(NamedTuple):
    """What a proxy does to each direction of a connection."""

    name: str
    delay_s: float = 0.0
    jitter_s: float = 0.0  # the largest further delay, drawn anew for each piece; the order of bytes is kept
    bytes_per_s: float | None = None

    def apply(self, proxy: FaultProxy) -> None:
        """Make a proxy's link this one. Open connections are reset, so that what was learned of them is forgotten."""
        proxy.delay_s, proxy.jitter_s, proxy.bytes_per_s = self.delay_s, self.jitter_s, self.bytes_per_s
        proxy.cut()


NAMED = {
    "jitter": Link("0 to 30 ms", jitter_s=0.015),
    "narrow": Link("1 Mbit/s", bytes_per_s=125_000.0),
}
DEFAULT_LINKS = ("0", "5", "20", "50", "200", *NAMED)


def parse_link(text: str) -> Link:
    """Return the link of a flag's value: a round trip in milliseconds, or a name. Raises ConfigError."""
    if text in NAMED:
        return NAMED[text]
    try:
        round_trip_ms = float(text)
    except ValueError:
        round_trip_ms = math.nan
    if not 0.0 <= round_trip_ms < math.inf:
        raise ConfigError(f"--link: '{text}' must be a round trip in milliseconds, or one of {', '.join(NAMED)}")
    return Link(f"{round_trip_ms:g} ms", delay_s=round_trip_ms / 2000)
