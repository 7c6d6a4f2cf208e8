"""Coverage by package, in lines and branches together: `python -m tests.covered build/coverage/report.json`.

Ends with 1 where a package is below what is expected.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

LEAST = 85.0  # percent


def main(report: Path) -> int:
    """Prints a table in Markdown, the least covered first."""
    shares = by_package(json.loads(report.read_text(encoding="utf-8")))
    print("| package | statements | branches | covered |\n|---|---|---|---|")
    for name, (statements, branches, share) in sorted(shares.items(), key=lambda row: row[1][2]):
        print(f"| `{name}` | {statements:,} | {branches:,} | {share:.1f} % |")
    low = [name for name, (_, _, share) in shares.items() if share < LEAST]
    print(f"\ncoverage: packages={len(shares)} below_{LEAST:.0f}={len(low)}")
    return 1 if low else 0


def by_package(report: dict[str, Any]) -> dict[str, tuple[int, int, float]]:
    """Statements, branches, and the percentage of both that was run, of each folder of ours."""
    totals: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for file, entry in report["files"].items():
        summary = entry["summary"]
        total = totals[str(Path(file).parent)]
        total[0] += summary["num_statements"]
        total[1] += summary["num_branches"]
        total[2] += summary["covered_lines"] + summary["covered_branches"]
    return {
        name: (statements, branches, 100.0 * covered / ((statements + branches) or 1))
        for name, (statements, branches, covered) in totals.items()
    }


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
