"""How long the engines of a cluster compute, by the metrics pages of its servers."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Mapping
from typing import NamedTuple, Self

PAGE = {"metrics": "127.0.0.1:0"}  # keys of a server whose time is read
TIMEOUT_S = 10.0
_SUMS = {"verifier-0": "outrider_step_forward_seconds_sum", "drafter-0": "outrider_draft_forward_seconds_sum"}


class IdleShares(NamedTuple):
    """The shares of a time in which no pass of the verifier, and none of the drafter, ran."""

    verifier: float
    drafter: float


class EngineTime(NamedTuple):
    """When it was read, and the seconds of all passes until then."""

    at: float
    verifier: float
    drafter: float

    @classmethod
    async def read(cls, pages: Mapping[str, str]) -> Self:
        """Read the pages of verifier-0 and drafter-0; `pages` has their addresses by the servers' names."""
        sums = await asyncio.gather(
            *(asyncio.to_thread(read_metric, pages[name], metric) for name, metric in _SUMS.items())
        )
        return cls(time.perf_counter(), *sums)

    def idle_since(self, before: EngineTime) -> IdleShares:
        """Return the shares of the time between two readings."""
        seconds = self.at - before.at
        busy = (self.verifier - before.verifier, self.drafter - before.drafter)
        return IdleShares(*(max(0.0, 1.0 - each / seconds) for each in busy))


def read_metric(address: str, metric: str) -> float:
    """Return a metric without labels of the server whose metrics are at this address; 0 before its first record."""
    found = re.search(rf"^{metric}(?:{{.*}})? (\S+)$", read_page(address, "metrics"), re.MULTILINE)
    return float(found[1]) if found else 0.0


def read_page(address: str, name: str) -> str:
    """Return a page of the server whose metrics are at this address."""
    with urllib.request.urlopen(f"http://{address}/{name}", timeout=TIMEOUT_S) as answer:
        text: str = answer.read().decode()
    return text
