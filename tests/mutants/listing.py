"""The hand-made mutants: each breaks one promise of the product, in a place that mutation tools do not reach.

`hand_made/*.toml` lists them, a file for each area:

    [[mutant]]
    name = "an-append-ignores-the-epoch"
    promise = "The promise that it breaks, as the documentation makes it."
    file = "outrider/store/append.lua"
    before = '''text that stands in the file exactly once'''
    after = '''text in its place'''
    tests = ["tests/store/test_sessions.py::test_that_finds_it_out"]  # fast ones; node ids or files

A mutant stays on the list when the code around it changes: its `before` is then to be adapted. One that no test finds
out needs a test, and is never taken off for that reason.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent / "hand_made"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file."""

    area: str  # the name of its list
    name: str
    promise: str  # that it breaks
    file: str  # relative to the repository
    before: str
    after: str
    tests: tuple[str, ...]  # pytest's node ids of those that are to find it out

    def applied(self, text: str) -> str:
        """The file's text with the change. Raises ValueError unless `before` stands there exactly once."""
        if (count := text.count(self.before)) != 1:
            raise ValueError(f"mutant {self.name}: its `before` stands {count} times in {self.file}, must be once")
        return text.replace(self.before, self.after)


def listed() -> list[Mutant]:
    """All of them, area by area."""
    return [
        Mutant(area.stem, **{**entry, "tests": tuple(entry["tests"])})
        for area in sorted(FOLDER.glob("*.toml"))
        for entry in tomllib.loads(area.read_text(encoding="utf-8"))["mutant"]
    ]
