"""What the simulator is given of a cluster, and what it predicts from that."""

from __future__ import annotations

import json
import random

import pytest

from bench.calibration import APART, CASES, Case, Outcome, Readings, kind_of, last_line, predict, saved
from outrider.cli.performance.samples import Sample
from outrider.simulation.deployment import Deployment, DrafterKind

READINGS = Readings(Deployment(level_ms=1.0, overhead_ms=1.0), DrafterKind(name="sampled", agreement=0.8), 0.5)


def drawn(agreement: float, best: float, depth: int, steps: int) -> Sample:
    """Steps over trees of `depth` levels, all of whose children are verified."""
    dice, reached = random.Random(0), [0] * depth
    for _ in range(steps):
        for level in range(depth):
            if dice.random() >= agreement:
                break
            reached[level] += 1
            if dice.random() >= best:
                break  # another child than the best; nothing was drafted below it
    return Sample((), (), steps, 0, tuple(reached), (steps,) * depth)


@pytest.mark.parametrize(("agreement", "best"), [(0.9, 0.95), (0.7, 0.8), (0.5, 0.9)])
def test_a_kind_is_read_from_how_often_each_depth_was_reached(agreement: float, best: float) -> None:
    kind = kind_of("code", 40, [drawn(agreement, best, depth, 20_000) for depth in (3, 6)])
    assert kind.agreement == pytest.approx(agreement, abs=0.02)
    assert kind.ranks[0] == pytest.approx(best, abs=0.02)
    assert sum(kind.ranks) == pytest.approx(1.0)


def test_a_kind_that_no_draft_of_was_accepted_agrees_never() -> None:
    assert kind_of("noise", 40, [Sample((), (), 10, 0, (0, 0), (10, 4))]).agreement == 0.0
    assert kind_of("noise", 40, [Sample((), (), 10)]).agreement == 0.0


def test_a_kind_whose_drafts_are_always_accepted_has_one_child_that_is_right() -> None:
    kind = kind_of("loop", 40, [Sample((), (), 10, 0, (10, 10, 10), (10, 10, 10))])
    assert (kind.agreement, kind.ranks[0]) == (1.0, 1.0)


def test_a_prediction_falls_with_distance() -> None:
    near, far = (predict(Case(APART, 1, round_trip_ms), READINGS, 10.0, 1) for round_trip_ms in (0.0, 100.0))
    assert near > 1.5 > far


def test_saved_calibration_readings_suffice_to_predict_again() -> None:
    outcome = Outcome(CASES[0], 2.0, 1.9)
    loaded = json.loads(saved({APART: READINGS}, [outcome]))
    (machine,) = loaded["machines"]
    again = Readings(
        Deployment.model_validate(machine["deployment"]),
        DrafterKind.model_validate(machine["kind"]),
        machine["nearest_ms"],
    )
    assert again == READINGS
    assert loaded["outcomes"][0]["measured"] == 2.0


def test_the_last_line_counts_the_cases_within_a_tenth() -> None:
    outcomes = [Outcome(CASES[0], 2.0, predicted) for predicted in (1.7, 1.9, 2.1, 2.3)]
    assert last_line(outcomes) == "calibration: least=0.85 most=1.15 within_a_tenth=2/4"
    assert last_line([]) == "calibration: -"
