"""`python -m bench.report.front RESULTS.json ...`: writes a table of the README, of the suite rows or formats.

    make bench-quick ARGS='--target 150M --target 400M --target 1B --save front'
    python -m bench.report.front bench/results/front.json
    make bench ARGS='--suite formats --target 1B --save 1B'
    make bench ARGS='--suite formats --target 8B --save 8B'
    python -m bench.report.front bench/results/1B.json bench/results/8B.json

A table's first line names the format of the results, when they were measured, of which revision, and on which
processor; a test fails where the format is older than that of today's benchmarks.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.report.results import FORMAT
from bench.rows.processes import ROOT

README = ROOT / "README.md"
COMMAND = "make bench-quick ARGS='--target 150M --target 400M --target 1B'"
FORMATS_COMMAND = "make bench ARGS='--suite formats --target 1B'"
ROWS: Mapping[str, tuple[str, ...]] = {  # names in the table, and the rows of which the fastest is taken
    "transformers": ("transformers",),
    "transformers, assisted by the same drafter": ("assisted",),
    "llama.cpp": ("llama.cpp",),
    "llama.cpp, the best of two drafted chains": ("llama.cpp-draft-3", "llama.cpp-draft-6"),
    "Outrider, plain": ("plain",),
    "**Outrider, distributed**": ("distributed",),
}
_TABLE = re.compile(r"<!-- figures: format (\d+), [^>]*-->\n.*?<!-- end of the figures -->\n", re.DOTALL)


def formats(page: str) -> list[int]:
    """The formats of the results that a page's tables were made of."""
    return [int(found) for found in _TABLE.findall(page)]


def formats_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """The table of quantized models, between its marks: of texts at temperature 1, by row and target."""
    texts = [text for run in runs for entry in run["formats"] for text in entry["texts"]]
    takes = [
        {"row": text["row"], "target": text["target"], "temperature": 1.0, "tokens_per_s": speed}
        for text in texts
        for speed in text["tokens_per_s"]
    ]
    dtypes = "/".join(dict.fromkeys(text["dtype"] for text in texts))
    return table({**runs[0], "takes": takes}, f"`{FORMATS_COMMAND}`, {dtypes}")


def table(results: Mapping[str, Any], title: str = f"`{COMMAND}`") -> str:
    """The table, between its marks: medians of tokens a second, by row, target and temperature."""
    takes = results["takes"]
    columns = sorted({(take["target"], take["temperature"]) for take in takes})
    machine = results["machine"]
    revision = machine["revision"].removesuffix("-dirty")
    when = f"{machine['when'][:10]}, {revision}, {machine['cpu']}, {machine['cores']} cores"
    lines = [
        f"<!-- figures: format {results.get('format', 1)}, {when} -->",
        f"| {title} | {' | '.join(f'{_size(target)}, T = {temperature:g}' for target, temperature in columns)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    speeds: dict[tuple[str, int, float], list[float]] = defaultdict(list)
    for take in takes:
        speeds[take["row"], take["target"], take["temperature"]].append(take["tokens_per_s"])
    for name, rows in ROWS.items():
        if not any((row, *column) in speeds for row in rows for column in columns):
            continue
        cells = []
        for column in columns:
            fastest = max((median(speeds[row, *column]) for row in rows if (row, *column) in speeds), default=None)
            speed = "-" if fastest is None else f"{fastest:.0f}"
            cells.append(f"**{speed}**" if name.startswith("**") else speed)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "<!-- end of the figures -->", ""])


def _size(target: int) -> str:
    return f"{target / 1e9:g}B" if target >= 1e9 else f"{target / 1e6:g}M"


def main(files: Sequence[Path]) -> None:
    """Write the README. Raises ValueError where it has no such table, or the results another format."""
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for file, run in zip(files, runs, strict=True):
        if run.get("format", 1) != FORMAT:
            raise ValueError(f"{file} has results of format {run.get('format', 1)}, not {FORMAT}: measure anew")
    quantized = bool(runs[0].get("formats"))
    command, new = (FORMATS_COMMAND, formats_table(runs)) if quantized else (COMMAND, table(runs[0]))
    page = README.read_text(encoding="utf-8")
    if len(found := [it[0] for it in _TABLE.finditer(page) if f"`{command}`" in it[0]]) != 1:
        raise ValueError(f"{README} must have one table of figures of {command}")
    README.write_text(page.replace(found[0], new), encoding="utf-8")


if __name__ == "__main__":
    main([*map(Path, sys.argv[1:])])
