"""Compares two runs of `outrider bench`: ratios with intervals, from the spread between repetitions.

The interval is Welch's, for the difference of two means of logarithms whose variances differ
(B. L. Welch, Biometrika 34, 1947). It holds what differs between repetitions, and nothing that differs between the runs
as a whole, such as a machine that is slower on one day.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance
from typing import NamedTuple

from rich.table import Table

from outrider.cli.command import figures_table
from outrider.cli.performance.points import LoadPoint

# Of Student's distribution, two-sided: 95 % lie within, by degrees of freedom from 1.
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
T_95_MORE = 2.131  # of more degrees it is less, so the interval is a little too wide


class ComparedRatio(NamedTuple):
    """A ratio of two figures, with the bounds of its interval; NaN where there are fewer than two repetitions."""

    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Return whether the interval excludes 1."""
        if not self.low <= self.high:
            return "too few repetitions"
        return "faster" if self.low > 1 else "slower" if self.high < 1 else "no difference shown"


def compared(now: Sequence[float], before: Sequence[float]) -> ComparedRatio:
    """Return the ratio of the geometric means of positive figures, with its interval of 95 %."""
    logs = [[math.log(figure) for figure in side] for side in (now, before)]
    difference = fmean(logs[0]) - fmean(logs[1])
    if min(map(len, logs)) < 2:
        return ComparedRatio(math.exp(difference), math.nan, math.nan)
    errors = [variance(side) / len(side) for side in logs]
    total = sum(errors)
    if not total:
        return ComparedRatio(*[math.exp(difference)] * 3)
    freedom = total**2 / sum(error**2 / (len(side) - 1) for error, side in zip(errors, logs, strict=True))
    quantile = T_95[int(freedom) - 1] if int(freedom) <= len(T_95) else T_95_MORE
    half = quantile * math.sqrt(total)
    return ComparedRatio(*(math.exp(difference + change) for change in (0.0, -half, half)))


def comparison_table(now: Sequence[LoadPoint], before: Sequence[LoadPoint]) -> Table:
    """Return a row for each load and mode that both runs have: tokens a second, and the ratio."""
    headings = ("callers", "", "before\ntok/s", "now\ntok/s", "\nratio", "\n95 % interval", "")
    table = figures_table(*headings, title="against the earlier run", title_justify="left")
    for callers in dict.fromkeys(point.callers for point in now):
        for speculative in (False, True):
            sides = [
                [point.goodput for point in run if (point.callers, point.speculative) == (callers, speculative)]
                for run in (now, before)
            ]
            if not all(sides) or min(map(min, sides)) <= 0:
                continue
            found = compared(*sides)
            table.add_row(
                str(callers),
                "speculative" if speculative else "plain",
                f"{fmean(sides[1]):.1f}",
                f"{fmean(sides[0]):.1f}",
                f"{found.ratio:.3f}",
                "-" if math.isnan(found.low) else f"{found.low:.3f} to {found.high:.3f}",
                found.verdict,
            )
    return table
