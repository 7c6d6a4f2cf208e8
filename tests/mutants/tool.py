"""The tool's mutants: mutmut changes every expression of the modules that pyproject.toml names ([tool.mutmut]).

They are the modules that fast tests judge alone, without a cluster. Each mutant is judged by those of the tests named
there that run the changed function. One that hangs or crashes is found out like one that fails a test.

`equivalent.toml` lists mutants that no test can find out, because nothing that is promised changes:

    [[equivalent]]
    function = "TokenTree.graft"  # as among the hand-made ones
    before = "the changed line or lines, without what surrounds them"
    after = ["those lines with the change"]  # one text for each such mutant
    reason = "Why no behaviour differs."

They are left out of the score. An entry is refused where no mutant that survives has that text.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import chdir
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code
from mutmut.utils.file_utils import walk_mutatable_files
from mutmut.utils.format_utils import get_module_from_key, orig_function_and_class_names_from_key

from tests.mutants.running import Copy
from tests.mutants.syntax import ROOT, scope

EQUIVALENT = Path(__file__).with_name("equivalent.toml")
SHOWN_LINES = 40  # of the tool's output when it could not run


class Verdict(Enum):
    """What became of a mutant."""

    FOUND_OUT = "found out"
    EQUIVALENT = "equivalent"  # listed as such; it survived
    SURVIVED = "survived"


VERDICTS = {
    "killed": Verdict.FOUND_OUT,
    "timeout": Verdict.FOUND_OUT,
    "segfault": Verdict.FOUND_OUT,  # mutmut's word for any signal that killed the tests
    "survived": Verdict.SURVIVED,
    "no tests": Verdict.SURVIVED,
}


@dataclass(frozen=True, slots=True)
class Change:
    """How a mutant differs from the product. Without the white space around: it is in the list's way."""

    function: str  # with module and class
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Judged:
    """One mutant."""

    file: str
    name: str  # mutmut's
    change: Change
    verdict: Verdict


class Judgement:
    """What became of all of them."""

    def __init__(self, mutants: Sequence[Judged], stale: Sequence[Change]) -> None:
        """`stale`: what is listed as equivalent and is no surviving mutant."""
        self.mutants = mutants
        self.stale = stale
        self.counts = Counter(one.verdict for one in mutants)

    @property
    def score(self) -> float:
        """The share that was found out of those that can be."""
        return self.counts[Verdict.FOUND_OUT] / (len(self.mutants) - self.counts[Verdict.EQUIVALENT])

    def lines(self) -> Iterator[str]:
        """A report: what survives, what is listed wrongly, and a table by file."""
        for one in self.mutants:
            if one.verdict is Verdict.SURVIVED:
                yield f"survived: {one.name}\n    - {one.change.before}\n    + {one.change.after}"
        for change in self.stale:
            yield f"listed as equivalent, but no such mutant survives: {change.function}: {change.after}"
        for file in sorted({one.file for one in self.mutants}):
            counts = Counter(one.verdict for one in self.mutants if one.file == file)
            yield f"{file:36}" + "".join(f"{counts[verdict]:6} {verdict.value}" for verdict in Verdict)


def judge(jobs: int) -> Judgement:
    """Makes the mutants in a copy of the repository and runs their tests, `jobs` at a time."""
    with tempfile.TemporaryDirectory(prefix="outrider-mutants-") as name:
        folder = Path(name).resolve()
        Copy(folder)
        began = time.monotonic()
        _run_mutmut(folder, jobs)
        judgement = read(folder)
        print(f"{len(judgement.mutants)} mutants by the tool, {time.monotonic() - began:.0f} s", flush=True)
    return judgement


def read(folder: Path) -> Judgement:
    """The judgement of a run of mutmut in `folder`."""
    listed = _listed()
    with chdir(folder):  # where mutmut looks for its results
        mutants = [_judged(str(path), name, code, listed) for path, name, code in _results()]
    surviving = {one.change for one in mutants if one.verdict is Verdict.EQUIVALENT}
    return Judgement(mutants, [change for change in listed if change not in surviving])


def _run_mutmut(folder: Path, jobs: int) -> None:
    command = [str(Path(sys.executable).with_name("mutmut")), "run", "--max-children", str(jobs)]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.exit("\n".join([*done.stdout.splitlines()[-SHOWN_LINES:], "mutmut could not run"]))


def _results() -> Iterator[tuple[Path, str, int | None]]:
    for path in walk_mutatable_files():
        data = SourceFileMutationData(path=path)
        data.load()
        for name, code in data.exit_code_by_key.items():
            yield path, name, code


def _judged(file: str, name: str, code: int | None, listed: Sequence[Change]) -> Judged:
    status = status_by_exit_code[code]
    if status not in VERDICTS:
        raise RuntimeError(f"mutmut could not judge {name}: {status} ({code})")
    change, verdict = _change(file, name), VERDICTS[status]
    if verdict is Verdict.SURVIVED and change in listed:
        verdict = Verdict.EQUIVALENT
    return Judged(file, name, change, verdict)


def _change(file: str, name: str) -> Change:
    """What a mutant changes."""
    function, kind = orig_function_and_class_names_from_key(name)
    lines = get_diff_for_mutant(name, path=file).splitlines()[3:]
    before, after = (" ".join(line[1:].strip() for line in lines if line[0] == sign) for sign in "-+")
    return Change(".".join(filter(None, (get_module_from_key(name), kind, function))), before, after)


def _listed() -> list[Change]:
    """The mutants that are listed as equivalent."""
    entries = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).get("equivalent", [])
    return [Change(_full(entry["function"]), entry["before"], after) for entry in entries for after in entry["after"]]


def _full(function: str) -> str:
    found = scope(function)
    return ".".join((*found.file.relative_to(ROOT).with_suffix("").parts, *found.path))
