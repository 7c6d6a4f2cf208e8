"""How many verifiers there will be: KEDA's query and the autoscaler's arithmetic, on the loads that matter."""

from __future__ import annotations

import math
from typing import Any

import promql_parser as promql
import pytest

from tests.deploy.manifests import of_kind, rendered

SLOTS = 16
Series = dict[str, list[float]]  # samples of all instances, by metric


def scaled() -> dict[str, Any]:
    spec: dict[str, Any] = of_kind(rendered("gpu"), "ScaledObject")["verifier"]["spec"]
    return spec


def evaluated(at: promql.Expr, series: Series) -> float | None:
    """The value of a query over sums and means; None where a metric has no sample."""
    match at:
        case promql.ParenExpr():
            return evaluated(at.expr, series)
        case promql.AggregateExpr():
            samples = series[at.expr.name]
            return None if not samples else sum(samples) / (len(samples) if str(at.op) == "avg" else 1)
        case promql.BinaryExpr():
            left, right = evaluated(at.lhs, series), evaluated(at.rhs, series)
            if left is None or right is None:
                return None
            return {"+": lambda: left + right, "/": lambda: left / right}[str(at.op)]()
    raise AssertionError(f"{type(at).__name__}: teach this test what it does")


def wanted(verifiers: int, running: int, waiting: int, *, replicas: int = 0) -> int:
    """Replicas by the Horizontal Pod Autoscaler for an external metric with an AverageValue.

    They are the metric over its target, rounded up, unless that is within a tenth of what there is; then within the
    bounds. `verifiers` are scraped, and of `replicas` (left out: as many) some may be starting."""
    spec, replicas = scaled(), replicas or verifiers
    (trigger,) = spec["triggers"]
    assert trigger["metricType"] == "AverageValue"
    series = {
        "outrider_sessions": [running / verifiers] * verifiers,
        "outrider_slots": [float(SLOTS)] * verifiers,
        "outrider_queue_depth": [waiting / 2, 0.0, waiting / 2],
    }
    value, target = (
        evaluated(promql.parse(trigger["metadata"]["query"]), series),
        float(trigger["metadata"]["threshold"]),
    )
    assert value is not None
    asked = replicas if abs(value / (target * replicas) - 1) <= 0.1 else math.ceil(value / target)
    return min(max(asked, spec["minReplicaCount"]), spec["maxReplicaCount"])


def test_requests_that_wait_add_verifiers_and_never_take_some_away() -> None:
    assert wanted(4, running=64, waiting=8) == 6  # all places are taken: 4.5 verifiers' worth, three quarters used
    for verifiers in range(2, 9):
        for waiting in (0, 1, 8, 100):
            assert wanted(verifiers, running=verifiers * SLOTS, waiting=waiting) >= verifiers


def test_a_load_that_fits_keeps_the_number_of_verifiers() -> None:
    assert wanted(4, running=48, waiting=0) == 4
    assert wanted(4, running=46, waiting=0) == 4


def test_free_slots_scale_verifiers_down_to_the_minimum() -> None:
    assert wanted(8, running=40, waiting=0) == 4
    assert wanted(8, running=0, waiting=0) == 2


def test_a_verifier_that_starts_is_not_asked_for_twice() -> None:
    assert wanted(4, running=64, waiting=8, replicas=6) == 6


def test_scaling_stops_at_the_maximum() -> None:
    assert wanted(8, running=128, waiting=400) == 8


@pytest.mark.parametrize("lost", ["outrider_sessions", "outrider_slots", "outrider_queue_depth"])
def test_missing_figures_do_not_count_as_a_load_of_zero(lost: str) -> None:
    (trigger,) = scaled()["triggers"]
    series: Series = {"outrider_sessions": [8.0], "outrider_slots": [16.0], "outrider_queue_depth": [0.0]}
    assert evaluated(promql.parse(trigger["metadata"]["query"]), series | {lost: []}) is None
    assert trigger["metadata"]["ignoreNullValues"] == "false"  # KEDA takes it for a failure then, and not for 0


def test_verifiers_are_not_scaled_down_without_prometheus() -> None:
    fallback = scaled()["fallback"]
    assert fallback["behavior"] == "currentReplicasIfHigher"
    assert fallback["replicas"] == scaled()["minReplicaCount"]


def test_drafters_follow_verifiers() -> None:  # bites: the manifest that ships
    (trigger,) = of_kind(rendered("gpu"), "ScaledObject")["drafter"]["spec"]["triggers"]
    assert trigger["type"] == "kubernetes-workload"
    assert trigger["metadata"]["value"] == "1"
