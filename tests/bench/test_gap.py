"""The time between passes is measured with the scheduler that serves."""

from __future__ import annotations

import asyncio
from statistics import median

import pytest

from bench.engine.gap import gaps


@pytest.mark.parametrize("runs_on", [False, True])
def test_the_gap_between_passes_measures_the_hosts_time(runs_on: bool) -> None:
    found = asyncio.run(gaps(4, 2.0, 0.6, runs_on=runs_on))
    assert len(found) > 20
    assert min(found) >= 0.0
    assert median(found) < 50.0  # milliseconds
