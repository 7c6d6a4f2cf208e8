"""The bench of drafters beside their verifier and elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.places import BESIDE, PLAIN, ROUND_TRIPS, Window, callers_at, last_line, measure, placed
from bench.rows.pinning import split_cores

WINDOWS = [
    *(Window(PLAIN, callers, speed) for callers, speed in ((1, 10.0), (2, 16.0), (4, 20.0))),
    *(Window("0", callers, speed) for callers, speed in ((1, 20.0), (2, 24.0), (4, 28.0))),
]


def test_callers_at_a_speed_are_between_those_that_were_measured() -> None:
    plain = {1: 10.0, 2: 16.0, 4: 20.0}  # a caller's token takes 0.1, 0.125 and 0.2 s
    assert callers_at(10.0, plain) == 1.0
    assert callers_at(8.0, plain) == 2.0
    assert callers_at(1.0 / 0.1625, plain) == pytest.approx(3.0)
    assert callers_at(2.0, plain) == 4.0  # as many as were measured
    assert callers_at(20.0, plain) == pytest.approx(0.5)  # one caller gets half of it


def test_the_line_for_scripts_has_each_place_over_plain() -> None:
    assert last_line(WINDOWS, "1B") == "places: target=1B plain=10.0 0=2.00,1.00"
    slower = [Window("0", it.callers, it.tokens_per_s / 2) if it.place == "0" else it for it in WINDOWS]
    assert last_line(slower, "1B") == "places: target=1B plain=10.0 0=1.00,0.64"


@pytest.mark.extended
async def test_every_place_is_measured_and_a_drafter_beside_has_the_verifiers_core() -> None:
    models, split = Path("models"), split_cores()
    async with placed(models / "target", models / "drafter", 4, split) as places:
        pids = places.beside.pids()
        assert os.sched_getaffinity(pids["drafter-0"]) == os.sched_getaffinity(pids["verifier-0"]) == split.verifier
        found = [window async for window in measure(places, [(1, 2, 3)], [1], 1.5)]
    assert [window.place for window in found] == [PLAIN, BESIDE, *ROUND_TRIPS, PLAIN]
    assert all(window.tokens_per_s > 0 for window in found)
