"""The tool's judgement counts what it should, and what is listed as equivalent is about the product as it is."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.running import Copy
from tests.mutants.syntax import ROOT, scope
from tests.mutants.tool import EQUIVALENT, Change, Judged, Judgement, Verdict

ENTRIES = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8"))["equivalent"]
CHANGE = Change("module.function", "a < b", "a <= b")


def judged(verdict: Verdict, *, file: str = "module.py") -> Judged:
    return Judged(file, "module.x_function__mutmut_1", CHANGE, verdict)


def test_the_score_is_the_share_of_detectable_mutants_that_were_found() -> None:  # bites: of the judge
    verdicts = [Verdict.FOUND_OUT] * 3 + [Verdict.SURVIVED] + [Verdict.EQUIVALENT] * 6
    assert Judgement([judged(verdict) for verdict in verdicts], []).score == 0.75


def test_the_report_names_survivors_and_counts_by_file() -> None:  # bites: of the judge
    mutants = [judged(Verdict.SURVIVED), judged(Verdict.FOUND_OUT), judged(Verdict.FOUND_OUT, file="other.py")]
    lines = [*Judgement(mutants, [CHANGE]).lines()]
    assert lines[:2] == [
        "survived: module.x_function__mutmut_1\n    - a < b\n    + a <= b",
        "listed as equivalent, but no such mutant survives: module.function: a <= b",
    ]
    assert [line.split() for line in lines[2:]] == [
        ["module.py", "1", "found", "out", "0", "equivalent", "1", "survived"],
        ["other.py", "1", "found", "out", "0", "equivalent", "0", "survived"],
    ]


@pytest.mark.extended
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["function"])
def test_an_equivalent_mutant_changes_existing_code(entry: dict[str, Any]) -> None:  # bites: of the judge
    lines = [line.strip() for line in scope(entry["function"]).file.read_text(encoding="utf-8").splitlines()]
    assert entry["before"] in " ".join(lines)
    assert entry["after"]
    assert entry["before"] not in entry["after"]
    assert entry["reason"].endswith(".")


@pytest.mark.extended
def test_the_copy_of_the_repository_has_the_compiled_module(tmp_path: Path) -> None:  # bites: of the tool
    Copy(tmp_path)
    there = [path.name for path in (ROOT / "outrider").glob("_native*.so")]
    assert there
    assert [path.name for path in (tmp_path / "outrider").glob("_native*.so")] == there
