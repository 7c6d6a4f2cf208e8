"""Runs the cells of the matrix in real clusters, and reports whether every answer is that of plain decoding."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from outrider.engine.transformers.quiet import quiet
from tests.matrix.cells import FACTORS, Cell, all_cells
from tests.matrix.clusters import Checkpoints, MatrixCluster, config_of
from tests.matrix.rules import DRAFTING, Law, RuleCell, all_rule_cells, draw, references
from tests.matrix.running import Outcome, run

SHOWN = 600  # characters of a problem


def main() -> None:
    """The command line. Exit status: 0; 1 if an answer differs or a cell failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--drafting", action="append", choices=FACTORS["drafting"], help="again for several; all")
    parser.add_argument("--seed", type=int, default=1, help="of the cells, and of their answers")
    parser.add_argument("--log", type=Path, help="what the servers print")
    options = parser.parse_args()
    with quiet():
        logging.disable_progress_bar()
    cells = [it for it in all_cells(options.seed) if it.drafting in (options.drafting or FACTORS["drafting"])]
    rules = all_rule_cells(options.seed)
    outcomes, laws = asyncio.run(run_all(cells, rules, options.seed, options.log))
    print_table(outcomes)
    print_laws(laws)
    print(last_line(outcomes, laws), flush=True)
    sys.exit(any(it.problem for it in outcomes) or any(it.broken(len(laws)) for it in laws))


async def run_all(
    cells: Sequence[Cell], rules: Sequence[RuleCell], seed: int, log: Path | None
) -> tuple[list[Outcome], list[Law]]:
    """The outcomes of all cells, printed one by one; those of the rules where their way to draft is among them."""
    began = time.monotonic()
    outcomes, laws = list[Outcome](), list[Law]()
    with tempfile.TemporaryDirectory(prefix="matrix-") as folder, (log or Path("/dev/null")).open("w") as lines:
        made = Checkpoints(Path(folder))
        for drafting, group in groupby(cells, lambda cell: cell.drafting):
            async with MatrixCluster(config_of(drafting, made), lambda *line: print(*line, file=lines)) as cluster:
                for cell in group:
                    outcomes.append(found := await run(cell, cluster, made.prompt, seed))
                    at = f"{len(outcomes)}/{len(cells)}, {time.monotonic() - began:.0f} s"
                    print(f"{at}: {', '.join(cell)}: {found.problem[:SHOWN] or 'identical'}", flush=True)
                if drafting != DRAFTING:
                    continue
                judges, prompt = references(made), made.tokens
                for rule_cell in rules:
                    laws.append(law := await draw(rule_cell, cluster, judges, prompt))
                    at = f"rules {len(laws)}/{len(rules)}, {time.monotonic() - began:.0f} s"
                    print(f"{at}: {', '.join(rule_cell)}: p = {law.p:.2g}", flush=True)
    return outcomes, laws


def print_table(outcomes: Sequence[Outcome]) -> None:
    """Prints a row for each way to draft."""
    table = Table(box=SIMPLE, show_edge=False)
    for heading in ("drafting", "cells", "identical", "tokens", "drafted", "killed"):
        table.add_column(heading, justify="left" if heading == "drafting" else "right")
    for drafting, group in groupby(outcomes, lambda outcome: outcome.cell.drafting):
        cells = [*group]
        figures = (
            len(cells),
            sum(not it.problem for it in cells),
            sum(it.tokens for it in cells),
            sum(it.accepted for it in cells),
            sum(it.struck for it in cells),
        )
        table.add_row(drafting, *map(str, figures))
    Console().print(table)


def print_laws(laws: Sequence[Law]) -> None:
    """Prints a row for each rule."""
    table = Table(box=SIMPLE, show_edge=False)
    for heading in ("rule", "cells", "tokens", "drafted", "smallest p"):
        table.add_column(heading, justify="left" if heading == "rule" else "right")
    for rule, group in groupby(laws, lambda law: law.cell.rule):
        cells = [*group]
        drawn, drafted = sum(it.tokens for it in cells), sum(it.accepted for it in cells)
        table.add_row(rule, str(len(cells)), str(drawn), str(drafted), f"{min(it.p for it in cells):.2g}")
    if laws:
        Console().print(table)


def last_line(outcomes: Sequence[Outcome], laws: Sequence[Law]) -> str:
    """The line for scripts."""
    bugs, broken = sum(bool(it.problem) for it in outcomes), sum(it.broken(len(laws)) for it in laws)
    return (
        f"matrix: cells={len(outcomes)} identical={len(outcomes) - bugs} bugs={bugs} "
        f"laws={len(laws) - broken} broken={broken}"
    )


if __name__ == "__main__":
    main()
