"""The bench of a shifting load: windows beside plain decoding, with drafters that are killed and come back."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from bench import windows
from bench.windows import DRAFTERS, ControlLog, ShiftingLoad, WindowFigures, last_line, shifting_loads

LOAD = ShiftingLoad(2, "code", (0.0, 1.0), 5.0, 1)


def test_the_line_for_scripts_has_the_worst_window_and_that_of_plain_decoding() -> None:
    figures = [WindowFigures(LOAD, ours, 90.0, 110.0, ControlLog()) for ours in (96.0, 150.0, 200.0)]
    assert last_line(figures) == (
        "windows: worst=0.96 tenth=0.96 median=1.50 all=1.49 plain_worst=0.90 plain_tenth=0.90"
    )
    assert last_line([]) == "windows: -"


def test_a_seed_reproduces_its_loads_and_the_loads_differ_from_one_another() -> None:
    loads = [*islice(shifting_loads(7), 60)]
    assert loads == [*islice(shifting_loads(7), 60)]
    assert {load.drafters for load in loads} == {*range(DRAFTERS + 1)}
    assert {load.text for load in loads} == {"code", "prose"}
    assert len({load.callers for load in loads}) == len(windows.CALLERS)


@pytest.mark.extended
async def test_windows_are_measured_while_drafters_of_a_real_cluster_leave_and_return(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads = [
        ShiftingLoad(2, "code", (0.0,), round_trip, drafters) for round_trip, drafters in ((0.0, 2), (5.0, 0), (0.0, 2))
    ]
    monkeypatch.setattr(windows, "WINDOW_S", 1.0)
    monkeypatch.setattr(windows, "shifting_loads", lambda _: iter(loads))
    figures: list[WindowFigures] = []
    models = Path("models")
    await windows.measure_windows(models / "target", models / "drafter", {"code": [(1, 2, 3)]}, 6, 1, figures)
    assert [it.load for it in figures] == [load for load in loads for _ in range(windows.STRETCH)]
    assert all(min(it.ours, it.before, it.after) > 0.0 for it in figures)
    assert all(it.control.arms.total() and it.control.least_budget_s <= 0.1 for it in figures)
