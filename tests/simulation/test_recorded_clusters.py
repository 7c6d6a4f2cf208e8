"""What the simulator predicts of clusters that were measured by `python -m bench.calibration`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.calibration import Case, Machine, Readings, predict
from outrider.simulation.deployment import Deployment, DrafterKind

pytestmark = pytest.mark.extended

RECORDED: list[dict[str, Any]] = json.loads(Path(__file__).with_name("recorded_clusters.json").read_text())
SECONDS, REPETITIONS = 15.0, 2  # as they were measured


@pytest.mark.parametrize("recorded", RECORDED)
def test_a_prediction_is_within_a_tenth_of_the_measurement(recorded: dict[str, Any]) -> None:
    readings = Readings(
        Deployment.model_validate(recorded["deployment"]),
        DrafterKind.model_validate(recorded["kind"]),
        recorded["nearest_ms"],
    )
    case = Case(Machine(**recorded["machine"]), recorded["callers"], recorded["round_trip_ms"])
    assert predict(case, readings, SECONDS, REPETITIONS) == pytest.approx(recorded["measured"], rel=0.1)
