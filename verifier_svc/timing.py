"""Where a step's time goes: the pass itself, deliberate waits, and everything else."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import NamedTuple

REMEMBERED = 32  # steps


class StepTime(NamedTuple):
    """One step, in seconds: from the end of the previous pass to the end of the step's own."""

    rows: float  # of the pass
    forward: float  # the pass
    waited: float  # the step was held back on purpose
    overhead: float  # neither: the walk, the commit, the choice of work, and the rest of the event loop's work


class StepTimes:
    """The latest steps that followed another without the scheduler being idle in between."""

    def __init__(self) -> None:
        self._latest: deque[StepTime] = deque(maxlen=REMEMBERED)

    def add(self, time: StepTime) -> None:
        """Add a step."""
        self._latest.append(time)

    def medians(self) -> StepTime:
        """Return the median of each figure by itself; zeros before the first step."""
        if not self._latest:
            return StepTime(0.0, 0.0, 0.0, 0.0)
        return StepTime(*map(median, zip(*self._latest, strict=True)))
