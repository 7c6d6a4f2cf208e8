"""The hand-made mutants: each breaks one promise of the product, in a way that the tool does not find.

`hand_made/*.toml` lists them, a file for each area:

    [[mutant]]
    name = "adapters-share-kv"
    promise = "The promise that it breaks, as the documentation makes it."
    function = "Contract.kv_group"  # or a class or a module: `syntax` says how it is named
    before = 'tenant if self.adapter is None else ...'  # an expression or statements that it has exactly once
    after = 'tenant'  # in their place
    tests = ["tests/store/test_sessions.py::test_that_finds_it_out"]  # fast ones; node ids or files

Only syntax counts in `before`, so code may be laid out anew, and moved to another module, and a function that gets
another name keeps its mutants by `python -m tests.mutants --renamed OLD NEW`. For what is not in Python there is `file`
in place of `function`, and `before` is text.

A mutant stays on the list when what it breaks changes: its `before` is then to be adapted. One that no test finds out
needs a test, and is never taken off for that reason. One whose function the tool changes is taken off.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.syntax import ROOT, replaced, scope

FOLDER = Path(__file__).parent / "hand_made"
LISTS = [*sorted(FOLDER.glob("*.toml")), FOLDER.with_name("equivalent.toml")]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file."""

    area: str  # the name of its list
    name: str
    promise: str  # the promise that it breaks
    before: str
    after: str
    tests: tuple[str, ...]  # pytest's node ids of those that are to find it out
    function: str = ""  # the function that it changes
    file: str = ""  # in place of a function, where it is not in Python

    @property
    def path(self) -> str:
        """The file that it changes, relative to the repository."""
        return self.file or str(scope(self.function).file.relative_to(ROOT))

    def mutated(self) -> str:
        """Return the file with the change. Raises ValueError unless `before` is there exactly once."""
        if self.function:
            return replaced(self.function, self.before, self.after)
        text = (ROOT / self.file).read_text(encoding="utf-8")
        if (count := text.count(self.before)) != 1:
            raise ValueError(f"{self.file}: has {self.before!r} {count} times, must have it once")
        return text.replace(self.before, self.after)


def listed() -> list[Mutant]:
    """Return all of them, area by area."""
    return [
        Mutant(area.stem, **{**entry, "tests": tuple(entry["tests"])})
        for area in sorted(FOLDER.glob("*.toml"))
        for entry in tomllib.loads(area.read_text(encoding="utf-8"))["mutant"]
    ]


def rename(old: str, new: str) -> int:
    """Give mutants of a function, class or module its new name; return how many."""
    count = 0
    for file in LISTS:
        text = file.read_text(encoding="utf-8")
        text, found = re.subn(
            rf'^(function = "(?:[\w.]*\.)?){re.escape(old)}((?:\.[\w.]*)?")$',
            rf"\g<1>{new}\g<2>",
            text,
            flags=re.MULTILINE,
        )
        file.write_text(text, encoding="utf-8")
        count += found
    return count
