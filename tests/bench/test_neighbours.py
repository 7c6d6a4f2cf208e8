"""The bench of a busy verifier beside an idle one."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import neighbours
from bench.neighbours import Round, Speeds, last_line
from outrider.cli.performance.load import Load

ROUND = Round(Speeds(200.0, 100.0), Speeds(150.0, 80.0), Speeds(150.0, 76.0))


def test_the_line_for_scripts_has_the_medians_of_both_verifiers() -> None:
    worse = Round(Speeds(200.0, 100.0), Speeds(150.0, 80.0), Speeds(75.0, 72.0))
    assert last_line([ROUND, worse, ROUND]) == (
        "neighbours: together_over_apart: busy=1.00 idle=0.95 apart_over_alone: busy=0.75 idle=0.80"
    )
    assert last_line([]) == "neighbours: -"


@pytest.mark.extended
async def test_windows_are_measured_with_verifiers_in_two_clusters_and_in_one() -> None:
    def load(callers: int, number: int) -> Load:
        return Load([tuple(range(1, 40))], callers, 1.0, 0.0, 16, seed=number, salts=1000)

    found: list[Round] = []
    models = Path("models")
    await neighbours.measure_rounds(models / "target", models / "drafter", 3, 1, None, load, found)
    (measured,) = found  # the first round is not counted
    assert all(speed > 0 for speeds in measured for speed in speeds)
