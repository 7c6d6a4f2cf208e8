"""The simulated cluster does what can be computed by hand, and what a cluster does."""

from pathlib import Path

import pytest

from outrider.cli.performance.simulate import simulated_phases
from outrider.config import load_section
from outrider.core.control.depth.policies import GammaPolicy, policy
from outrider.core.session.contract import OFF, Plan
from outrider.errors import ConfigError
from outrider.simulation.cluster import SimulatedCluster
from outrider.simulation.deployment import (
    Deployment,
    DrafterKind,
    Scenario,
    SimulationOutcome,
    TrafficPhase,
    sum_outcomes,
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "simulations" / "shifting_load.toml"
FLAT = Deployment(pass_ms={1: 20.0, 128: 20.0}, overhead_ms=0.0, level_ms=1.0, level_more_ms=0.0)


def run(
    name: str, agreement: float, *, deployment: Deployment = FLAT, callers: int = 1, trip: float = 0.0, depth: int = 8
) -> SimulationOutcome:
    kind = DrafterKind(name="text", agreement=agreement, ranks=(1.0,), prompt=1, answer=256)
    phase = TrafficPhase(seconds=30, kinds=("text",), callers=callers, round_trip_ms=trip)
    ceilings = Plan(depth=depth, width=1, nodes=depth) if depth else OFF

    def make(_: DrafterKind) -> GammaPolicy:
        return policy(name, ceilings)

    return next(iter(SimulatedCluster(Scenario(deployment=deployment, kind=[kind], phase=[phase]), make, 1).run()))


def test_plain_decode_commits_a_token_a_pass() -> None:
    assert run("off", 0.8).goodput == pytest.approx(50, rel=0.01)
    assert run("off", 0.8, callers=8).goodput == pytest.approx(400, rel=0.01)
    assert run("off", 0.8).acceptance_length == 1.0


def test_a_perfect_drafter_s_whole_tree_is_committed_and_a_useless_one_s_never() -> None:
    rounds, chosen = run("rounds", 1.0, depth=4), run("fixed", 1.0, depth=4)
    assert rounds.acceptance_length == pytest.approx(5.0, rel=0.02)
    assert chosen.goodput > 0.95 * rounds.goodput  # trials of other ways of working included
    useless = run("fixed", 0.0)
    assert useless.acceptance_length == 1.0
    assert useless.goodput > 0.9 * 50


@pytest.mark.parametrize("agreement", [0.5, 0.8])
def test_acceptance_lengths_follow_the_formula_of_a_chain(agreement: float) -> None:
    """At most that many: the step starts when waiting for another level does not pay."""
    longest = sum(agreement**depth for depth in range(9))
    assert 0.7 * longest < run("fixed", agreement).acceptance_length <= 1.03 * longest


def test_distance_costs_speed_and_never_more_than_a_little_of_plain_decode() -> None:
    near, far, very_far = (run("goodput", 0.8, trip=trip).goodput for trip in (0.0, 20.0, 200.0))
    assert near > far > very_far > 0.9 * 50
    assert near > 1.8 * 50


def test_callers_beyond_the_slots_wait_and_lose_no_goodput() -> None:
    deployment = FLAT.model_copy(update={"slots": 2})
    few, many = run("off", 0.8, deployment=deployment, callers=2), run("off", 0.8, deployment=deployment, callers=9)
    assert many.goodput == pytest.approx(few.goodput, rel=0.02)


def test_an_equal_seed_gives_equal_figures() -> None:
    assert run("goodput", 0.7, callers=4) == run("goodput", 0.7, callers=4)


def test_goodput_is_ahead_of_every_fixed_gamma_in_rounds_and_never_behind_plain_decoding() -> None:
    """The whole of it is `outrider simulate examples/simulations/shifting_load.toml`."""
    scenario = load_section(Scenario, EXAMPLE)
    rows = ("off", "rounds:1", "rounds:2", "rounds:4", "goodput")
    outcomes = {name: list(simulated_phases(scenario, name, 24, 0)) for name in rows}
    speeds = {name: sum_outcomes(phases).goodput for name, phases in outcomes.items()}
    assert speeds["goodput"] > 1.12 * max(speed for name, speed in speeds.items() if name.startswith("rounds:"))
    for ours, plain in zip(outcomes["goodput"], outcomes["off"], strict=True):
        assert ours.goodput > 0.98 * plain.goodput
        assert ours.switches_per_second < 1.0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[[kind]]\nname = 'a'\nagreement = 2\n[[phase]]\nseconds = 1\nkinds = ['a']", "kind.0.agreement"),
        ("[[kind]]\nname = 'a'\nagreement = 1\n[[phase]]\nseconds = 1\nkinds = ['b']", "b: there is no such kind"),
        ("[[kind]]\nname = 'a'\nagreement = 1\ncolour = 1\n[[phase]]\nseconds = 1\nkinds = ['a']", "unknown key"),
        ("kind", "not valid TOML"),
    ],
)
def test_a_malformed_scenario_is_refused_with_the_reason(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        load_section(Scenario, file)
    with pytest.raises(ConfigError, match="No such file"):
        load_section(Scenario, tmp_path / "none.toml")
