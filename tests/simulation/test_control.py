"""Over a grid of clusters control loses nothing to plain decoding, and finds what the best fixed way finds."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from outrider.core.control.depth.goodput import AcceptancePriors
from outrider.core.control.depth.policies import GammaPolicy, policy
from outrider.core.session.contract import OFF, Plan, PlanOverlap
from outrider.simulation.cluster import SimulatedCluster
from outrider.simulation.deployment import Deployment, DrafterKind, Scenario, SimulationOutcome, TrafficPhase

SECONDS = 40.0
GRID = [
    pytest.param(*each, id="agreement {}, {} callers, {} ms, contention {}".format(*each))
    for each in product((0.1, 0.8), (1, 4, 16), (0.0, 20.0), (0.0, 0.7))
]


def run(agreement: float, callers: int, trip_ms: float, contention: float, ceilings: Plan) -> SimulationOutcome:
    kind = DrafterKind(name="text", agreement=agreement)
    phase = TrafficPhase(seconds=SECONDS, kinds=("text",), callers=callers, round_trip_ms=trip_ms)
    deployment = Deployment(contention=contention)
    name, priors = ("goodput", AcceptancePriors()) if ceilings.depth else ("off", None)

    def make(_: DrafterKind) -> GammaPolicy:
        return policy(name, ceilings, priors)

    return next(iter(SimulatedCluster(Scenario(deployment=deployment, kind=[kind], phase=[phase]), make, 3).run()))


@pytest.mark.extended
@pytest.mark.parametrize(("agreement", "callers", "trip_ms", "contention"), GRID)
def test_control_is_never_slower_than_plain_and_nearly_as_fast_as_the_best_fixed_mode(
    agreement: float, callers: int, trip_ms: float, contention: float
) -> None:
    """The forty seconds are the cluster's first."""
    cluster = agreement, callers, trip_ms, contention
    measured = Plan(depth=16, nodes=24)
    ours = run(*cluster, measured)
    plain = run(*cluster, OFF).goodput
    fixed = max(
        run(*cluster, replace(measured, overlap=way)).goodput for way in (PlanOverlap.ALWAYS, PlanOverlap.NEVER)
    )
    assert ours.goodput > 0.98 * plain
    assert ours.goodput > 0.85 * fixed
    assert ours.switches_per_second < 0.5
