"""How often the target chooses a drafted token: by depth, and by rank among siblings."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from outrider.core.session.contract import StepReport

DEPTHS = 64  # depths that are counted
RANKS = 16  # ranks that are counted; the last one stands for all after it
FIRST = 0.7  # acceptance probability of a token before the first observation
PRIOR = 12.0  # observations that the prior from other sessions counts as
MEMORY = 0.995  # weight of a session's past at each step


class AcceptanceCounts:
    """Acceptance counts over steps that verified at least one node. Weighting makes them real numbers."""

    def __init__(self, values: Iterable[float] = ()) -> None:
        """Begin with the numbers that `values()` returned, or with zeros if there are none.

        Raises ValueError for numbers that `values()` cannot have returned.
        """
        held = np.fromiter(values, np.float64)
        self._all = held if held.size else np.zeros(2 * DEPTHS + RANKS)
        if len(self._all) != 2 * DEPTHS + RANKS or not (np.isfinite(self._all) & (self._all >= 0.0)).all():
            raise ValueError("these are no counts")
        self.tried, self.reached, self.ranks = np.split(self._all, [DEPTHS, 2 * DEPTHS])  # views
        # tried: [depth - 1] steps that verified a node at that depth whose parent was committed
        # reached: [depth - 1] those of these steps that committed a node at that depth
        # ranks: [rank] committed nodes, by how many siblings had a better score

    def __deepcopy__(self, memo: object) -> AcceptanceCounts:
        """Return a copy whose arrays are views of one, too."""
        return AcceptanceCounts(self._all)

    def observe(self, report: StepReport) -> None:
        """Add one step."""
        accepted = min(report.accepted, DEPTHS)
        self.tried[: min(report.verified_depth, accepted + 1)] += 1.0
        self.reached[:accepted] += 1.0
        for rank in report.ranks:
            self.ranks[min(rank, RANKS - 1)] += 1.0

    def add(self, other: AcceptanceCounts) -> None:
        """Add the counts of another."""
        self._all += other._all

    def scale(self, by: float) -> None:
        """Multiply all counts by a factor."""
        self._all *= by

    def values(self) -> list[float]:
        """Return all counts as a list of 2 * DEPTHS + RANKS numbers, to be stored."""
        return [float(value) for value in self._all]

    def copy_from(self, other: AcceptanceCounts) -> None:
        """Copy the counts of another into this object, so that all its users see them."""
        self._all[:] = other._all

    @property
    def steps(self) -> float:
        """The number of steps counted."""
        return float(self.tried[0])


class Acceptance:
    """One session's acceptance rates, with the counts of other sessions as prior."""

    def __init__(self, others: AcceptanceCounts) -> None:
        """`others` are the counts of the same target, drafters and kind of traffic. They may continue to change."""
        self._others = others
        self._own = AcceptanceCounts()

    def observe(self, report: StepReport) -> None:
        """Add a step that verified at least one node."""
        self._own.scale(MEMORY)
        self._own.observe(report)

    def reach(self, depth: int) -> list[float]:
        """Return, for each depth up to `depth`, the probability that a tree is accepted down to it: [min(depth, 64)].

        A depth without observations has the acceptance rate of the level above.
        """
        chances: list[float] = []
        last, path = FIRST, 1.0
        for index in range(min(depth, DEPTHS)):
            prior = _mean(self._others, index, last)
            last = _mean(self._own, index, prior)
            path *= last
            chances.append(path)
        return chances

    def width(self, share: float) -> int:
        """Return the smallest number of siblings that contains the share `share` (0 to 1) of committed nodes."""
        seen = np.cumsum(self._own.ranks + self._others.ranks)
        return int(np.searchsorted(seen, share * seen[-1])) + 1 if seen[-1] else RANKS


def _mean(counts: AcceptanceCounts, index: int, prior: float) -> float:
    return float((counts.reached[index] + PRIOR * prior) / (counts.tried[index] + PRIOR))
