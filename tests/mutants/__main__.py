"""`make mutants`: breaks the product on purpose, and reports what no test has noticed.

Exits with status 1 if a mutant survives. The last line has the figures.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.listing import Mutant, listed, rename
from tests.mutants.running import PASSED, Copy, Outcome, Result
from tests.mutants.tool import Verdict, judge

SHOWN_LINES = 30  # of the output of tests that could not run


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="what to run; all, unless given")
    parser.add_argument("--only", metavar="NAME", action="append", help="hand-made mutants or areas to run")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (2)")
    parser.add_argument("--renamed", metavar=("OLD", "NEW"), nargs=2, help="give its mutants a function's new name")
    arguments = parser.parse_args()
    if arguments.renamed:
        sys.exit(f"{rename(*arguments.renamed)} mutants are those of {arguments.renamed[1]} now")
    figures: dict[str, object] = {}
    surviving = 0
    for part in arguments.part or (["hand-made"] if arguments.only else PARTS):
        found, more = PARTS[part](arguments)
        figures |= found
        surviving += more
    print("mutants:", *(f"{name}={figure}" for name, figure in figures.items()), f"surviving={surviving}")
    sys.exit(surviving > 0)


Part = Callable[[argparse.Namespace], tuple[dict[str, object], int]]  # its figures, and how many mutants survive


def by_tool(arguments: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Judges the mutants of the tool. What is wrongly listed as equivalent counts as one that survives."""
    judgement = judge(arguments.jobs)
    print(*judgement.lines(), sep="\n")
    return {"tool_score": f"{judgement.score:.3f}"}, judgement.counts[Verdict.SURVIVED] + len(judgement.stale)


def hand_made(arguments: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Judges the mutants of the lists. A mutant whose tests could not run was not found out."""
    mutants = [one for one in listed() if not arguments.only or {one.name, one.area} & {*arguments.only}]
    if not mutants:
        sys.exit(f"no mutant and no area is named {' or '.join(arguments.only)}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="outrider-mutants-") as folder:
        copies = [Copy(Path(folder).resolve() / str(number)) for number in range(arguments.jobs)]
        _check_unmutated(copies, mutants)
        results = _judged(copies, mutants)
    bad = [result for result in results if result.outcome is not Outcome.FOUND_OUT]
    print(f"{len(mutants)} hand-made mutants, {len(mutants) - len(bad)} found out, {time.monotonic() - began:.0f} s")
    for result in bad:
        print(f"{result.outcome.value}: {result.mutant.area}/{result.mutant.name}: {result.mutant.promise}")
        if result.outcome is Outcome.BROKEN:
            print(*result.output.splitlines()[-SHOWN_LINES:], sep="\n")
    return {"hand_made": len(mutants)}, len(bad)


PARTS: dict[str, Part] = {"tool": by_tool, "hand-made": hand_made}


def _check_unmutated(copies: Sequence[Copy], mutants: Sequence[Mutant]) -> None:
    """Runs all their tests on the product as it is. Ends the process where one fails."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    print(f"{len(tests)} tests without any mutant ...", flush=True)
    began = time.monotonic()
    with ThreadPoolExecutor(len(copies)) as pool:
        shares = [tests[index :: len(copies)] for index in range(len(copies))]
        runs = pool.map(lambda copy, share: copy.run(share, None) if share else (PASSED, ""), copies, shares)
        for status, output in runs:
            if status != PASSED:
                sys.exit(f"{output}\nthe tests fail without any mutant")
    print(f"... pass in {time.monotonic() - began:.0f} s", flush=True)


def _judged(copies: Sequence[Copy], mutants: Sequence[Mutant]) -> list[Result]:
    """All of them, one at a time in each copy; a line for each as it is judged."""
    free: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def judge(mutant: Mutant) -> Result:
        copy = free.get()
        try:
            result = copy.judge(mutant)
        finally:
            free.put(copy)
        print(f"{result.outcome.value:9}  {result.seconds:5.1f} s  {mutant.area}/{mutant.name}", flush=True)
        return result

    with ThreadPoolExecutor(len(copies)) as pool:
        return list(pool.map(judge, mutants))


if __name__ == "__main__":
    main()
