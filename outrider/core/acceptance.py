"""How often the target says what was drafted: by depth, and by rank among siblings."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from outrider.core.contract import StepReport

DEPTHS = 64  # the deepest that is told apart
RANKS = 16  # likewise; the last stands for all after it
FIRST = 0.7  # chance of a token before anything was seen
BELIEF = 12.0  # observations that what others saw counts as
MEMORY = 0.995  # weight of a session's past at each step


class Counts:
    """What was seen in steps that verified something."""

    def __init__(self, values: Iterable[float] = ()) -> None:
        """`values`: what `values` gave; none to begin with. Raises ValueError for what cannot be that."""
        held = np.fromiter(values, np.float64)
        self._all = held if held.size else np.zeros(2 * DEPTHS + RANKS)
        if len(self._all) != 2 * DEPTHS + RANKS or not (np.isfinite(self._all) & (self._all >= 0.0)).all():
            raise ValueError("these are no counts")
        self.tried, self.reached, self.ranks = np.split(self._all, [DEPTHS, 2 * DEPTHS])  # views
        # tried: [depth - 1] steps that verified a node there, its parent being committed
        # reached: of these, those that committed one there
        # ranks: committed nodes, by how many siblings had a better score

    def observe(self, report: StepReport) -> None:
        """Takes a step."""
        accepted = min(report.accepted, DEPTHS)
        self.tried[: min(report.verified_depth, accepted + 1)] += 1.0
        self.reached[:accepted] += 1.0
        for rank in report.ranks:
            self.ranks[min(rank, RANKS - 1)] += 1.0

    def add(self, other: Counts) -> None:
        """Takes what another saw."""
        self._all += other._all

    def fade(self, by: float) -> None:
        """Weighs everything so far so much."""
        self._all *= by

    def values(self) -> list[float]:
        """All of it, to be stored."""
        return [float(value) for value in self._all]

    def become(self, other: Counts) -> None:
        """Holds what another does; whoever looks at this one sees it."""
        self._all[:] = other._all

    @property
    def steps(self) -> float:
        """How many were seen."""
        return float(self.tried[0])


class Acceptance:
    """One session's, which believes what others saw until it has seen enough itself."""

    def __init__(self, others: Counts) -> None:
        """`others`: of the same target, drafters and kind of traffic. They may go on counting."""
        self._others = others
        self._own = Counts()

    def observe(self, report: StepReport) -> None:
        """Takes a step that verified something."""
        self._own.fade(MEMORY)
        self._own.observe(report)

    def reach(self, depth: int) -> list[float]:
        """For each depth up to that one, the chance that a tree so deep is accepted so far.

        Where nothing was seen the target is believed to agree as often as it does one level above.
        """
        chances: list[float] = []
        last, path = FIRST, 1.0
        for index in range(min(depth, DEPTHS)):
            usual = _mean(self._others, index, last)
            last = _mean(self._own, index, usual)
            path *= last
            chances.append(path)
        return chances

    def width(self, share: float) -> int:
        """The fewest siblings among which so large a share of what was committed would have been."""
        seen = np.cumsum(self._own.ranks + self._others.ranks)
        return int(np.searchsorted(seen, share * seen[-1])) + 1 if seen[-1] else RANKS


def _mean(counts: Counts, index: int, believed: float) -> float:
    return float((counts.reached[index] + BELIEF * believed) / (counts.tried[index] + BELIEF))
