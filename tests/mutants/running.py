"""Runs tests on a mutated copy of the repository, never on the working tree."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from pathlib import Path

from tests.mutants.listing import Mutant
from tests.mutants.syntax import ROOT

LIMIT_S = 120.0  # for the tests of one mutant; one that hangs is found out
TEST_LIMIT_S = 60  # for one test: those of the lists take a few seconds
PACKAGES = ("outrider", "router", "verifier_svc", "drafter_svc", "tests")
FIRST_CHANGE_S = 1_000_000_000  # modification time of the first mutated file

# Pytest's exit statuses: https://docs.pytest.org/en/stable/reference/exit-codes.html
PASSED, FAILED = 0, 1


class Outcome(Enum):
    """What became of a mutant."""

    FOUND_OUT = "found out"  # a test failed, or hung
    SURVIVED = "survived"  # all tests passed
    BROKEN = "broken"  # the tests could not run, which shows nothing


@dataclass(frozen=True, slots=True)
class Result:
    """One mutant's run."""

    mutant: Mutant
    outcome: Outcome
    seconds: float
    output: str  # of its tests


class Copy:
    """The repository's tracked files, as they are in the working tree, in a folder where they may be changed, with the
    compiled module."""

    def __init__(self, folder: Path) -> None:
        """Raises RuntimeError where Python would import other code than the copy's."""
        self.folder = folder
        self._times = count(FIRST_CHANGE_S)
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
        compiled = (str(built.relative_to(ROOT)) for built in (ROOT / "outrider").glob("_native*.so"))
        for name in (*filter(None, tracked.split("\0")), *compiled):
            if (ROOT / name).exists():  # else it was deleted and not committed
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        self._check_imports()

    def judge(self, mutant: Mutant) -> Result:
        """Applies the mutant, runs its tests, takes it back."""
        file = self.folder / mutant.path
        times = file.stat()
        original = file.read_text(encoding="utf-8")
        file.write_text(mutant.mutated(), encoding="utf-8")
        when = next(self._times)
        os.utime(file, (when, when))  # compiled modules are taken for new by time and size: both may be the same
        began = time.monotonic()
        try:
            status, output = self.run(mutant.tests)
        finally:
            file.write_text(original, encoding="utf-8")
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        return Result(mutant, _outcome(status), time.monotonic() - began, output)

    def run(self, tests: Sequence[str], limit_s: float | None = LIMIT_S) -> tuple[int | None, str]:
        """Pytest's exit status for these tests and its output. The status is None where they ran out of time."""
        options = ["-x", "-q", "--no-header", "--durations=0", "--durations-min=1", "-p", "no:cacheprovider"]
        command = ["-m", "pytest", *options, f"--timeout={TEST_LIMIT_S}", "--hypothesis-seed=0", *tests]
        with subprocess.Popen(
            [sys.executable, *command],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as running:
            try:
                output, _ = running.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
                output, _ = running.communicate()
                return None, output
            except BaseException:
                os.killpg(running.pid, signal.SIGKILL)
                raise
        return running.returncode, output

    @property
    def _environment(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(self.folder)}

    def _check_imports(self) -> None:
        """The packages may be installed from another folder, as by `pip install -e`; the copy's have to come first,
        also where a test starts a server as `python -P -m ...`."""
        script = f"import importlib\nfor name in {PACKAGES}: print(importlib.import_module(name).__file__)"
        found = subprocess.run(
            [sys.executable, "-P", "-c", script],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            check=True,
        )
        foreign = [line for line in found.stdout.split() if not Path(line).is_relative_to(self.folder)]
        if foreign:
            raise RuntimeError(f"the copy in {self.folder} is not what Python imports, but {foreign}")


def _outcome(status: int | None) -> Outcome:
    """By pytest's exit status; None: it ran out of time; negative: a signal killed it."""
    if status == PASSED:
        return Outcome.SURVIVED
    return Outcome.FOUND_OUT if status is None or status < 0 or status == FAILED else Outcome.BROKEN
