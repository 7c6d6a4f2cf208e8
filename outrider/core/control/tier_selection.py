"""Selection of the drafter tiers that draft for a generation, by measured speed.

A tier pays if one of its passes over a tree takes less time than it saves the tier above (docs/drafters.md, "Tiers").
That depends on machines, models and texts, so it is measured: at first all tiers draft, then every other set of tiers
has a trial.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

from outrider.core.control.overlap import ArmSelector

Tiers = frozenset[int]
ALL_SETS = 3  # up to this many tiers every set is tried; beyond, all tiers, all but one, and single tiers


class TierSelector(ArmSelector[Tiers]):
    """Selects among sets of tiers. An observation is a time window of a generation, not a step."""

    PROOF = (1, 4)
    SETTLING = 0  # the caller leaves out the time after a change

    def name(self, arm: Tiers) -> str:
        """Return the tiers' numbers, for people."""
        return "+".join(map(str, sorted(arm)))


class TierSwitch:
    """Selects tiers for all generations of a router. Greedy generations are measured separately, because drafters
    predict them better."""

    def __init__(self, *, measured: bool = True) -> None:
        """If not `measured`, all tiers always draft."""
        self._measured = measured
        self._selectors: dict[tuple[Tiers, bool], TierSelector] = {}

    def wanted(self, present: Tiers, greedy: bool) -> Tiers:
        """Return the tiers, among those `present`, that should draft now."""
        if len(present) < 2 or not self._measured:
            return present
        if (present, greedy) not in self._selectors:
            self._selectors[present, greedy] = TierSelector(_sets(present), present)
        return self._selectors[present, greedy].arm

    def estimates(self) -> list[dict[str, Any]]:
        """Return the measured speeds of sets of tiers, in tokens per second, for each set that was present."""
        return [
            {"present": sorted(present), "greedy": greedy, **selector.estimates()}
            for (present, greedy), selector in tuple(self._selectors.items())
        ]

    def observe(self, present: Tiers, greedy: bool, used: Tiers, tokens: int, seconds: float) -> None:
        """Record a time window of a generation: with the tiers `used`, `tokens` tokens took `seconds` seconds."""
        selector = self._selectors.get((present, greedy))
        if selector is not None and used == selector.arm and tokens:
            selector.observe(tokens, seconds)


def _sets(present: Tiers) -> list[Tiers]:
    """Return the sets of tiers to try, the largest first."""
    count = len(present)
    sizes = range(count, 0, -1) if count <= ALL_SETS else (count, count - 1, 1)
    return [frozenset(some) for size in sizes for some in combinations(sorted(present), size)]
