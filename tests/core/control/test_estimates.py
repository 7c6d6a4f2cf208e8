"""What controllers decide from can be read: as JSON, with units in the names, and equal to what decides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.core.control.arms.governor import Governor
from outrider.core.control.arms.steering import SessionTokens, Steering
from outrider.core.control.cost.budget import CostModel
from outrider.core.control.cost.calibration import Calibration
from outrider.core.control.cost.plain_pace import PlainPace
from outrider.core.control.depth.goodput import AcceptancePriors, Goodput
from outrider.core.control.depth.policies import POLICIES
from outrider.core.control.drafters.contributions import ContributionTracker, DrafterContribution
from outrider.core.control.drafters.tier_selection import TierSwitch
from outrider.core.control.drafting_terms import DraftingTerms
from outrider.core.control.holds.arrival_model import ArrivalPatterns, Arrivals
from outrider.core.control.holds.hold_policy import HoldPolicy
from outrider.core.control.trial_gate import TrialGate
from outrider.core.session.contract import Plan, StepReport
from tests.core.control.plant import SteeredSession

CEILINGS = Plan(depth=8, width=4, nodes=24, wait_us=20_000)
UNITS = ("_s", "_tokens", "_per_s", "_per_step", "_steps")
COUNTS = {
    "steps",
    "windows",
    "switches",
    "pairs",
    "sessions",
    "open_sessions",
    "depth",
    "wanted_depth",
    "reach",
}  # numbers, levels, probabilities
SHARES = {
    "claimed",
    "factor",
    "verified_min_path_score",
    "ratio",
    "low",
    "high",
    "reading_ratio",
    "relative_error",
}  # probabilities and their ratios


def numbers(value: Any, name: str = "") -> Iterator[str]:
    """The names of all numbers in it."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from numbers(below, key)
    elif isinstance(value, list):
        for below in value:
            yield from numbers(below, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name


def report(accepted: int) -> StepReport:
    return StepReport(
        verified=8,
        accepted=accepted,
        verified_depth=4,
        elapsed_us=50_000,
        waited_us=10_000,
        first_us=4_000,
        level_us=2_000,
        sessions=1,
        ranks=bytes(accepted),
        plan_version=1,
    )


def observed() -> dict[str, Any]:
    """Controllers that have learned something, by name."""
    priors = AcceptancePriors()
    goodput = Goodput(CEILINGS, priors)
    for step in range(40):
        goodput.observe(report(step % 4))
    cost = CostModel([(1, 0.01), (32, 0.02)])
    hold, steering = HoldPolicy(), Steering(Governor(PlainPace(cost.points())), cost)
    arrivals = Arrivals(hold.patterns(greedy=True))
    session = SteeredSession(DraftingTerms(CEILINGS, drawn=False), greedy=True)
    steering.on_opened([session])
    for step in range(60):
        arrivals.restart(step * 0.1, 1.0)
        arrivals.arrived(step * 0.1 + 0.01, 1.5, passing=False)
        tokens = 1 if session.terms.resting else 3
        steering.on_step([session], [SessionTokens(session, tokens, tokens)], 0, 0.01 if tokens == 1 else 0.02)
    tiers = TierSwitch()
    both = frozenset({0, 1})
    for _ in range(9):
        tiers.observe(both, True, tiers.wanted(both, True), 100, 1.0)
    contributions = ContributionTracker()
    contributions.observe((DrafterContribution("a", 4, 2, 2), DrafterContribution("b", 4, 1, 0)))
    terms = DraftingTerms(CEILINGS, drawn=False)
    terms.hold_tokens_per_s = 6.0
    gate = TrialGate()
    gate.observe(0.5, 0.1)
    calibration = Calibration()
    for _ in range(100):
        calibration.observe(-0.05, False)
    return locals()


def test_every_estimate_has_a_unit_in_its_name_or_is_a_count_or_a_share() -> None:
    made = observed()
    shown = {
        name: made[name].estimates()
        for name in ("priors", "goodput", "hold", "steering", "tiers", "terms", "gate", "calibration")
    }
    assert json.loads(json.dumps(shown)) == shown
    names = set(numbers(shown)) - COUNTS - SHARES - {"per_s", "present"}
    assert names
    assert not [name for name in names if not name.endswith(UNITS)]


def test_the_estimates_shown_are_those_that_decide() -> None:
    made = observed()
    assert made["goodput"].estimates()["depth"] == made["goodput"].plan().depth
    assert made["goodput"].estimates()["tokens_per_step"] == pytest.approx(2.5, abs=0.5)
    shown = made["priors"].estimates()
    assert (shown["first_s"], shown["level_s"], shown["step_s"]) == pytest.approx((0.004, 0.002, 0.04))
    assert shown["steps"] == 40
    assert shown["reach"] == sorted(shown["reach"], reverse=True)
    hold = made["hold"].estimates()
    assert hold["greedy"]["fresh"][0] == pytest.approx({"delay_s": 0.01, "gain_tokens": 0.5})
    steering = made["steering"].estimates()
    assert steering["arm"] == str(made["steering"].governor.arm)
    (load,) = steering["loads"]
    assert (load["sessions"], load["kind"], load["usual"]) == (1, "greedy", "turns")
    (tiers,) = made["tiers"].estimates()
    assert (tiers["present"], set(tiers["arms"])) == ([0, 1], {"0", "1", "0+1"})
    assert made["contributions"].estimates() == {"a": 2.0, "b": 0.0}
    assert made["terms"].estimates()["hold_tokens_per_s"] == 6.0
    assert made["gate"].estimates()["gain_tokens"] == 0.5
    first, *others = made["calibration"].estimates()
    assert first["factor"] < 0.1
    assert {other["factor"] for other in others} == {1.0}


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_shows_its_depth(name: str) -> None:
    policy = POLICIES[name](CEILINGS, AcceptancePriors())
    assert policy.estimates()["depth"] == policy.plan().depth


def test_arrival_patterns_begin_empty() -> None:
    assert ArrivalPatterns().estimates() == {
        "fresh": [],
        "kept": [],
        "starting": [],
        "trial_in_steps": 2,
    }
