"""Parts of the suite that run at once, as long as each other: `pytest --table FILE --lane 1/2`.

A table has how long each file takes, the slowest first; `pytest --write-table FILE` makes it. There is one for
`make test`, and one for what `make test-all` runs besides.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOGETHER = ("tests/e2e/",)  # folders whose tests share a cluster
NEW_S = 0.5  # of a file that the table lacks: it is new, or runs in the other part


class Lane:
    """Leaves out the files of other lanes, without importing them."""

    def __init__(self, lane: str, table: Path | None) -> None:
        """`lane`: "1/2" is the first of two; without a table all files count alike. Raises UsageError for no lane."""
        number, _, of = lane.partition("/")
        if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
            raise pytest.UsageError(f"--lane: {lane!r} is no lane; one of two is 1/2 or 2/2")
        files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
        self._mine = balanced(files, read_table(table) if table else {}, int(of))[int(number) - 1]

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """True for a file of another lane; None: others decide."""
        if collection_path.suffix != ".py" or not collection_path.is_relative_to(ROOT):
            return None
        return str(collection_path.relative_to(ROOT)) not in self._mine or None


class Durations:
    """Adds up what the tests of each file took, fixtures included."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of one test."""
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Writes the table."""
        write_table(self._path, self._seconds)


def balanced(files: set[str], seconds: dict[str, float], lanes: int) -> list[set[str]]:
    """The longest first, each to the lane that has least. All processes need one result: tenths of a second are
    added as integers, whose sum does not depend on the order of a set."""
    groups: defaultdict[str, set[str]] = defaultdict(set)
    for file in files:
        groups[next((folder for folder in TOGETHER if file.startswith(folder)), file)].add(file)
    took = {name: sum(round(10 * seconds.get(file, NEW_S)) for file in group) for name, group in groups.items()}
    parts: list[set[str]] = [set() for _ in range(lanes)]
    loads = [0] * lanes
    for name in sorted(groups, key=lambda name: (-took[name], name)):
        least = loads.index(min(loads))
        loads[least] += took[name]
        parts[least] |= groups[name]
    return parts


def read_table(path: Path) -> dict[str, float]:
    """The seconds that each file takes."""
    rows = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {file: float(seconds) for seconds, file in rows}


def write_table(path: Path, seconds: dict[str, float]) -> None:
    """Writes the table, the slowest file first."""
    rows = sorted(seconds.items(), key=lambda row: (-round(row[1], 1), row[0]))
    path.write_text("".join(f"{took:7.1f} {file}\n" for file, took in rows), encoding="utf-8")
