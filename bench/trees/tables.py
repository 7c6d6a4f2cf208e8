"""Prints the tables at the end of a run, and saves the run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench.report.figures import shown
from bench.report.results import FOLDER, machine
from bench.trees.cells import LENIENCE, MODELS, OURS, Cell, Setting
from bench.trees.figures import Estimate, Results, last_line, our_name, verdicts
from outrider.core.construction import CONSTRUCTIONS
from outrider.core.session.contract import RULES

MISSING = "-"
NOTES = (
    "Acceptance length: tokens that one step commits, 1 + accepted, +- its standard error over prompts. * is ours. "
    "- marks combinations that do not exist: rules that compare p with q accept neither trees that are chosen by score "
    "nor trees of drafters without a q. Lossy rules change the text. Roots, rows and draws are the same in all cells. "
    "The randomness of shared noise and of drafts is averaged over draws; that of the other rules is summed exactly. "
    "Scales, calibration and acceptance by rank were fitted on other prompts. Constructions that choose by score get "
    "the same fitted scores."
)


def print_tables(screen: Console, setting: Setting, results: Results) -> None:
    """Print a table for each drafter and temperature and the comparison with ours, or only ours by temperature."""
    if setting.ours_alone:
        for temperature in setting.temperatures:
            screen.print(_ours(setting, results, temperature))
        return
    for drafter in setting.drafters:
        for temperature in setting.temperatures:
            screen.print(_lengths(setting, results, drafter, temperature))
    screen.print(_standing(results))
    screen.print(NOTES, markup=False)


def save(setting: Setting, results: Results, prompts: Sequence[str], name: str | None, seconds: float) -> Path:
    """Write NAME.json, or a file named by the time, atomically, and return its path."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name or time.strftime('trees-%Y%m%d-%H%M%S')}.json"
    content = {
        "line": last_line(results),
        "seconds": round(seconds),
        "machine": machine(),
        "setting": asdict(setting) | {"lenience": LENIENCE},
        "prompts": list(prompts),
        "cells": [
            cell._asdict() | {"lossy": cell.lossy, "mean": Estimate.of(values).mean, "by_prompt": list(values)}
            for cell, values in results.items()
        ],
    }
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    os.replace(draft, path)
    return path


def _ours(setting: Setting, results: Results, temperature: float) -> Table:
    table = Table(title=f"{', '.join(OURS)}, T = {temperature:g}", title_justify="left", title_style="bold", box=SIMPLE)
    table.add_column("drafter", no_wrap=True)
    for budget in setting.budgets:
        table.add_column(f"{budget} nodes", justify="right", no_wrap=True)
    for drafter in setting.drafters:
        cells = [Cell(drafter, temperature, *OURS, budget) for budget in setting.budgets]
        table.add_row(drafter, *(_entry(results.get(cell)) for cell in cells))
    return table


def _lengths(setting: Setting, results: Results, drafter: str, temperature: float) -> Table:
    table = Table(title=f"{drafter}, T = {temperature:g}", title_justify="left", title_style="bold", box=SIMPLE)
    table.add_column("rule, construction", no_wrap=True)
    for budget in setting.budgets:
        table.add_column(f"{budget} nodes", justify="right", no_wrap=True)
    for rule in RULES:
        for construction in CONSTRUCTIONS:
            cells = [Cell(drafter, temperature, rule, construction, budget) for budget in setting.budgets]
            if any(cell in results for cell in cells) or drafter in MODELS:
                table.add_row(our_name(cells[0]), *(_entry(results.get(cell)) for cell in cells))
        table.add_section()
    return table


def _standing(results: Results) -> Table:
    table = Table(
        title="ours and the best other lossless combination", title_justify="left", title_style="bold", box=SIMPLE
    )
    for heading in ("drafter", "T", "nodes"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ours", "best other", "difference"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("which", no_wrap=True)
    table.add_column("", no_wrap=True)
    for verdict in verdicts(results):
        cell = verdict.ours
        table.add_row(
            cell.drafter,
            f"{cell.temperature:g}",
            str(cell.budget),
            _shown(verdict.length),
            _shown(verdict.best_length),
            _shown(verdict.lead),
            our_name(verdict.best),
            "" if verdict.holds else "behind",
        )
    return table


def _entry(values: Sequence[float] | None) -> str:
    return MISSING if values is None else _shown(Estimate.of(values))


def _shown(estimate: Estimate) -> str:
    return f"{estimate.mean:.2f} +- {shown(estimate.error, 2)}"
