"""Means, standard errors, and the comparison of Outrider's default with the others. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from bench.trees.cells import FEWEST, OURS, Cell

Results = Mapping[Cell, Sequence[float]]  # of each prompt, in the same order for all cells


class Estimate(NamedTuple):
    """A mean over prompts."""

    mean: float
    error: float  # standard error; NaN for a single prompt

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Return the estimate over prompts. Roots of one text are not independent and count as one observation."""
        count = len(values)
        mean = sum(values) / count
        squares = sum((value - mean) ** 2 for value in values)
        return cls(mean, math.sqrt(squares / (count - 1) / count) if count > 1 else math.nan)


class CellVerdict(NamedTuple):
    """Our cell compared with the best other lossless cell of the same drafter, temperature and budget."""

    ours: Cell
    length: Estimate
    best: Cell  # the best other one
    best_length: Estimate
    lead: Estimate  # difference of our length and the best other one, paired by prompt
    holds: bool  # ours is at least equal to every other, within one standard error of the paired difference


def verdicts(results: Results) -> list[CellVerdict]:
    """Return a verdict for each drafter, temperature and budget."""
    found = []
    drafters = [*dict.fromkeys(cell.drafter for cell in results)]
    for ours in sorted(filter(_is_ours, results), key=partial(_place, drafters)):
        lengths = results[ours]
        others = {
            cell: values
            for cell, values in results.items()
            if not cell.ours
            and not cell.lossy
            and (cell.drafter, cell.temperature, cell.budget) == (ours.drafter, ours.temperature, ours.budget)
        }
        if not others:
            continue
        leads = {
            cell: Estimate.of([mine - other for mine, other in zip(lengths, values, strict=True)])
            for cell, values in others.items()
        }
        best = max(others, key=lambda cell: sum(others[cell]))
        holds = all(lead.mean >= -(lead.error if math.isfinite(lead.error) else 0.0) - 1e-9 for lead in leads.values())
        found.append(CellVerdict(ours, Estimate.of(lengths), best, Estimate.of(others[best]), leads[best], holds))
    return found


def _is_ours(cell: Cell) -> bool:
    return cell.ours


def _place(drafters: Sequence[str], cell: Cell) -> tuple[int, float, int]:
    return drafters.index(cell.drafter), cell.temperature, cell.budget


def last_line(results: Results) -> str:
    """Return the line for scripts: the number of cells, and of the combinations with FEWEST nodes or more, how often
    ours is best or equal, and how often it is behind."""
    judged = [verdict.holds for verdict in verdicts(results) if verdict.ours.budget >= FEWEST]
    return f"trees: cells={len(results)} ours_best_or_equal={sum(judged)} behind={len(judged) - sum(judged)}"


def our_name(cell: Cell) -> str:
    """Return the name of a row in tables."""
    name = f"{cell.rule}{' (lossy)' if cell.lossy else ''}, {cell.construction}"
    return f"{name} *" if (cell.rule, cell.construction) == OURS else name
