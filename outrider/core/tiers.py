"""Which tiers of drafters are worth their while: whichever set of them was measured to be fastest.

A tier pays if one of its passes over a tree takes less than what it saves the tier above (DESIGN, section 9). That
hangs on machines, models and texts, so it is measured: all work at first, then every other set of tiers has its trial.
"""

from __future__ import annotations

from itertools import combinations

from outrider.core.ways import Contest

Tiers = frozenset[int]
ALL_SETS = 3  # tiers of which every set is tried; of more, all, all but one, and single ones


class TierContest(Contest[Tiers]):
    """Over stretches of generations."""

    PROOF = (1, 4)
    SETTLING = 0  # who observes leaves it out


class TierChoice:
    """Shared by the generations of a router. The greedy ones are on their own: drafters guess better what they say."""

    def __init__(self, *, measured: bool = True) -> None:
        """Not `measured`: all tiers draft."""
        self._measured = measured
        self._contests: dict[tuple[Tiers, bool], TierContest] = {}

    def wanted(self, present: Tiers, greedy: bool) -> Tiers:
        """Of the tiers that are there, those that are to draft now."""
        if len(present) < 2 or not self._measured:
            return present
        if (present, greedy) not in self._contests:
            self._contests[present, greedy] = TierContest(_sets(present), present)
        return self._contests[present, greedy].way

    def observe(self, present: Tiers, greedy: bool, used: Tiers, tokens: int, seconds: float) -> None:
        """A stretch of a generation that was drafted by `used` took so long for so many tokens."""
        contest = self._contests.get((present, greedy))
        if contest is not None and used == contest.way and tokens:
            contest.observe(tokens, seconds)


def _sets(present: Tiers) -> list[Tiers]:
    """Those that are tried, the largest first."""
    count = len(present)
    sizes = range(count, 0, -1) if count <= ALL_SETS else (count, count - 1, 1)
    return [frozenset(some) for size in sizes for some in combinations(sorted(present), size)]
