"""`python -m bench.report.front RESULTS.json`: writes the table of the README from a run of the suite `rows`.

    make bench-quick ARGS='--target 150M --target 400M --target 1B --save front'
    python -m bench.report.front bench/results/front.json

The table's first line names the format of the results, when they were measured, of which revision, and on which
processor; a test fails where the format is older than that of today's benchmarks.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from bench.report.results import FORMAT
from bench.rows.processes import ROOT

README = ROOT / "README.md"
COMMAND = "make bench-quick ARGS='--target 150M --target 400M --target 1B'"
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


def table(results: Mapping[str, Any]) -> str:
    """The table, between its marks: medians of tokens a second, by row, target and temperature."""
    takes = results["takes"]
    columns = sorted({(take["target"], take["temperature"]) for take in takes})
    machine = results["machine"]
    revision = machine["revision"].removesuffix("-dirty")
    when = f"{machine['when'][:10]}, {revision}, {machine['cpu']}, {machine['cores']} cores"
    lines = [
        f"<!-- figures: format {results.get('format', 1)}, {when} -->",
        f"| `{COMMAND}` | {' | '.join(f'{_size(target)}, T = {temperature:g}' for target, temperature in columns)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    speeds: dict[tuple[str, int, float], list[float]] = defaultdict(list)
    for take in takes:
        speeds[take["row"], take["target"], take["temperature"]].append(take["tokens_per_s"])
    for name, rows in ROWS.items():
        cells = []
        for column in columns:
            fastest = max((median(speeds[row, *column]) for row in rows if (row, *column) in speeds), default=None)
            speed = "-" if fastest is None else f"{fastest:.0f}"
            cells.append(f"**{speed}**" if name.startswith("**") else speed)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "<!-- end of the figures -->", ""])


def _size(target: int) -> str:
    return f"{target / 1e9:g}B" if target >= 1e9 else f"{target / 1e6:g}M"


def main(file: Path) -> None:
    """Write the README. Raises ValueError where it has no table, or the results another format."""
    results = json.loads(file.read_text(encoding="utf-8"))
    if results.get("format", 1) != FORMAT:
        raise ValueError(f"{file} has results of format {results.get('format', 1)}, not {FORMAT}: measure anew")
    text, tables = _TABLE.subn(lambda _: table(results), README.read_text(encoding="utf-8"))
    if tables != 1:
        raise ValueError(f"{README} must have one table of figures")
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
