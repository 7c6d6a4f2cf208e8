"""Writes docs/results.md and its plots from recorded runs of `bench.real`.

make bench-real ARGS='--save as-is'
make bench-real ARGS='--size 1B --save real-1B'
python -m bench.report.results_page as-is real-1B
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.real import OURS, Cells, RealTake, compared_cells, speed, speed_cells
from bench.report.results import FOLDER
from bench.rows.processes import ROOT

PAGE = ROOT / "docs" / "results.md"
IMAGES = ROOT / "docs" / "images"
HEAD = """# How fast is it with a real model?

SmolLM2 135M, which answers questions, is asked everyday ones of five kinds (`bench/prompts/real.jsonl`): each once, at
a temperature that differs from prompt to prompt, and the rows take turns. The drafter is the one in `models/`;
lookups draft from what was said before. All rows run on the same two cores. A padded target costs what a model of that
size costs and says what SmolLM2 says, so acceptance is that of SmolLM2.

*Speed* is tokens a second after the first token: the median over prompts. *Over peers* compares each answer with the
fastest of the peers' answers to the same prompt, and is the median of that. *Tokens a step* is the mean of what a pass
of the target commits.

Made by

```bash
python -m bench.report.results_page {files}
```

"""


class RealRun:
    """A recorded run."""

    def __init__(self, file: Path) -> None:
        content: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        self.name = file.stem
        self.machine = content["machine"]
        self.options = content["options"]
        self.takes = [RealTake(**take) for take in content["takes"]]
        self.rows = list(dict.fromkeys(take.row for take in self.takes))
        self.temperatures = sorted({take.temperature for take in self.takes})

    @property
    def ours(self) -> list[str]:
        """Our rows."""
        return [row for row in OURS if row in self.rows]

    @property
    def peers(self) -> list[str]:
        """The others' rows."""
        return [row for row in self.rows if row not in OURS]

    @property
    def title(self) -> str:
        """What the target was."""
        size = self.options["size"]
        kind = self.options.get("type", "None")
        if size == "None":
            return f"As it is, {'Q4_1' if kind == 'None' else kind}"
        return f"Padded to {int(size) / 1e9:g}B, {'Q4_K_M' if kind == 'None' else kind}"


def section(run: RealRun) -> str:
    """Return a run's part of the page."""
    machine = run.machine
    return "\n".join(
        [
            f"## {run.title}",
            "",
            f"{machine['cpu']}, {machine['cores']} cores, {machine['when'][:10]}, revision "
            f"{machine['revision'].removesuffix('-dirty')}; {len(run.takes) // len(run.rows)} answers of each row, of "
            f"{run.options['tokens']} tokens.",
            "",
            f"![Speed of each row by temperature](images/results-{run.name}.svg)",
            "",
            *_table(speed_cells(run.takes, [*run.peers, *run.ours])),
            "",
            *_table(compared_cells(run.takes, run.peers)),
            "",
        ]
    )


def _table(cells: Cells) -> list[str]:
    heads, *rows = (f"| {' | '.join(row)} |" for row in cells)
    return [heads, "|---" * len(cells[0]) + "|", *rows]


def plot(run: RealRun, file: Path) -> None:
    """Draw a row's speeds as bars, one for each temperature."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = run.name  # the same figures give the same file
    rows = [*run.peers, *run.ours][::-1]
    figure = Figure(figsize=(8, 0.5 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(run.temperatures)
    for number, at in enumerate(run.temperatures):
        places = [place + 0.4 - height * (number + 0.5) for place in range(len(rows))]
        axes.barh(places, [speed(run.takes, row, at) for row in rows], height, label=f"T = {at:g}")
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlabel="tokens a second", title=run.title)
    axes.legend(loc="lower right")
    figure.savefig(file, metadata={"Date": None})


def main(files: Sequence[Path]) -> None:
    """Write the page and its plots."""
    runs = [RealRun(file) for file in files]
    for run in runs:
        plot(run, IMAGES / f"results-{run.name}.svg")
    named = " ".join(file.stem for file in files)
    PAGE.write_text("\n".join([HEAD.format(files=named).rstrip("\n"), "", *map(section, runs)]), encoding="utf-8")


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("runs", nargs="+", help="names in bench/results")
    main([FOLDER / f"{name}.json" for name in flags.parse_args().runs])
