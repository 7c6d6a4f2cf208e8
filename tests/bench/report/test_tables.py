"""Tables of results."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from bench.report.figures import BenchResults, LoadFigures, StepProfile
from bench.report.tables import print_tables

PROFILE = StepProfile(1, "", 4, 10.0, 0.0, 1.0, math.nan, 5.0, 5.0)


def load(row: str, goodput: float, callers: int = 4, repetition: int = 0) -> LoadFigures:
    return LoadFigures(1_000_000, row, callers, repetition, goodput, 9, 1.5, 0.1, 0.01, 0.02, PROFILE)


def printed(results: BenchResults) -> str:
    screen = Console(file=io.StringIO(), width=132)
    print_tables(screen, results)
    text: str = screen.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_pinned_arms_are_listed_beside_the_arm_that_the_verifier_chooses() -> None:
    goodput = {"plain": 10.0, "distributed": 11.0, "turns": 15.0, "turns 1/4": 12.5}
    results = BenchResults(loads=[load(row, it) for row, it in goodput.items()])
    *_, heading, _, line = [line.split() for line in printed(results).splitlines() if line.strip()]
    assert heading == ["callers", "distributed", "turns", "turns", "1/4"]
    assert line == ["4", "1.10", "1.50", "1.25"]


@pytest.mark.parametrize("plain", [10.0, 0.0])
def test_a_report_without_pinned_arms_has_one_table(plain: float) -> None:
    text = printed(BenchResults(loads=[load("plain", plain), load("distributed", 11.0)]))
    assert "Pinned" not in text
    assert ("1.10" in text) is (plain > 0.0)
