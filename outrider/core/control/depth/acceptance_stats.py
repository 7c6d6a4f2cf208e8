"""How often the target chooses a drafted token: by depth, and by rank among siblings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from outrider.core.session.contract import StepReport
from outrider.core.stats import LONG

DEPTHS = 64  # depths that are counted
RANKS = 16  # ranks that are counted; the last one stands for all after it


@dataclass(frozen=True, slots=True)
class GoodputTuning:
    """When and how far a plan changes."""

    weight: float = 0.1  # weight of one step in an average
    dwell_s: float = 1.0  # seconds between two plans at least
    slack: float = 0.1  # share by which the chosen depth, a ceiling, may be slower than the best one
    width_share: float = 0.98  # share of committed nodes that a plan's width must contain
    min_prior_steps: int = 64  # steps of other sessions from which on new ones start with their depth
    first_acceptance: float = 0.7  # probability that a token is accepted, before the first observation
    prior: float = 12.0  # observations that the prior from other sessions counts as


GOODPUT = GoodputTuning()


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
        self._own.scale(LONG)
        self._own.observe(report)

    def reach(self, depth: int) -> list[float]:
        """Return, for each depth up to `depth`, the probability that a tree is accepted down to it: [min(depth, 64)].

        A depth without observations has the acceptance rate of the level above.
        """
        chances: list[float] = []
        last, path = GOODPUT.first_acceptance, 1.0
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
    return float((counts.reached[index] + GOODPUT.prior * prior) / (counts.tried[index] + GOODPUT.prior))
