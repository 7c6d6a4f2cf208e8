"""The tables at the end of a run, and the run on disk."""

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

from bench.figures import shown
from bench.results import FOLDER, machine
from bench.trees.cells import LENIENCE, MODELS, OURS, Cell, Setting
from bench.trees.figures import Estimate, Results, last_line, our_name, verdicts
from outrider.core.construction import CONSTRUCTIONS
from outrider.core.contract import RULES

MISSING = "-"
NOTES = (
    "Acceptance length: tokens that one step commits, 1 + accepted, +- its standard error over prompts. * is ours. "
    "- is what a rule does not take: trees chosen by value, or of drafters without a q, held p against q. Lossy rules "
    "change what is said. Roots, rows and draws are the same in all cells. What shared noise or the drafts leave to "
    "chance is averaged over draws; what the other rules leave to chance is summed exactly. Scales, calibration and "
    "acceptance by rank were learned on other prompts. Constructions that choose by value get the same fitted scores."
)


def print_tables(screen: Console, setting: Setting, results: Results) -> None:
    """One table for each drafter and temperature, and where ours stands; or one of ours for each temperature."""
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
    """Writes NAME.json, or one named by the time. It appears complete or not at all."""
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
        title="ours and the best other that is lossless", title_justify="left", title_style="bold", box=SIMPLE
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
