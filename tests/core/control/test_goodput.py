"""The goodput policy goes as deep as pays, and keeps a plan for a while."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.control.depth.acceptance_stats import GOODPUT, Acceptance, AcceptanceCounts
from outrider.core.control.depth.goodput import AcceptancePriors, Goodput, GoodputInputs, best_depth, speed
from outrider.core.session.contract import Plan, StepReport

CEILINGS = Plan(depth=16, nodes=32)
chances = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12).map(lambda some: _products(some))


def _products(some: list[float]) -> list[float]:
    path, products = 1.0, []
    for each in some:
        path *= each
        products.append(path)
    return products


class Cluster:
    """A session whose drafter takes turns with steps of 20 ms, or goes on meanwhile."""

    def __init__(self, gamma: Goodput, *, rate: float, first: float = 0.002, level: float = 0.002) -> None:
        self.gamma = gamma
        self.rng = random.Random(5)
        self.rate, self.first, self.level = rate, first, level
        self.resting = False
        self.seconds = 0.0
        self.plans: list[tuple[float, Plan]] = []

    def run(self, seconds: float) -> Plan:
        until = self.seconds + seconds
        while self.seconds < until:
            depth = 0 if self.resting else self.gamma.plan().depth
            accepted = 0
            while accepted < depth and self.rng.random() < self.rate:
                accepted += 1
            held = self.first + (depth - 1) * self.level if depth else 0.0
            took = 0.020 + held
            self.seconds += took
            self.gamma.observe(
                StepReport(
                    verified=depth,
                    accepted=accepted,
                    verified_depth=depth,
                    waited_us=int(held * 1e6),
                    forward_us=20_000,
                    drafters=int(self.gamma.plan().depth > 0),
                    elapsed_us=int(took * 1e6),
                    rows=depth + 1,
                    sessions=1,
                    first_us=int(self.first * 1e6) if depth else 0,
                    level_us=int(self.level * 1e6) if depth > 1 else 0,
                    ranks=bytes(accepted),
                    resting=self.resting and self.gamma.plan().depth > 0,
                )
            )
            self.plans.append((self.seconds, self.gamma.plan()))
        return self.gamma.plan()


def test_goodput_drafts_as_deep_as_acceptance_and_level_cost_justify() -> None:
    sure, unsure = (Cluster(Goodput(CEILINGS), rate=rate).run(20).depth for rate in (0.95, 0.4))
    assert sure >= 10
    assert 1 <= unsure <= 4
    slow = Cluster(Goodput(CEILINGS), rate=0.8, level=0.015).run(20).depth
    fast = Cluster(Goodput(CEILINGS), rate=0.8, level=0.001).run(20).depth
    assert slow < fast


@given(st.integers(0, 2**32), st.floats(0.0, 1.0))
def test_plans_change_less_than_once_a_second_and_their_versions_rise(seed: int, rate: float) -> None:
    cluster = Cluster(Goodput(CEILINGS), rate=rate)
    cluster.rng = random.Random(seed)
    for _ in range(3):
        cluster.rate = cluster.rng.random()
        cluster.run(3)
    changes = [(then, after) for (_, before), (then, after) in pairwise(cluster.plans) if after != before]
    assert all(later - sooner >= GOODPUT.dwell_s - 1e-6 for (sooner, _), (later, _) in pairwise(changes))
    versions = [plan.version for _, plan in changes]
    assert versions == sorted(set(versions))
    assert all(plan.depth <= CEILINGS.depth and plan.nodes <= CEILINGS.nodes for _, plan in changes)


def test_steps_while_drafters_rest_change_no_estimate() -> None:
    cluster = Cluster(Goodput(CEILINGS), rate=0.8)
    before = cluster.run(20), cluster.gamma.estimates()
    cluster.resting = True
    assert (cluster.run(20), cluster.gamma.estimates()) == before


def test_a_new_session_begins_at_the_depth_of_other_sessions() -> None:
    priors = AcceptancePriors()
    known = Cluster(Goodput(CEILINGS, priors), rate=0.3).run(20)
    assert abs(Goodput(CEILINGS, priors).plan().depth - known.depth) <= 1
    assert Goodput(CEILINGS).plan().depth == CEILINGS.depth


@given(chances, st.floats(0.001, 0.1), st.floats(0.0, 0.1), st.floats(0.0, 0.02), st.floats(0.0, 0.1), st.floats(0, 64))
def test_the_best_depth_is_the_fastest_of_all_depths(
    reach: list[float], step: float, first: float, level: float, hidden: float, others: float
) -> None:
    here = GoodputInputs(step, first, level, hidden, others)
    best = best_depth(reach, here)
    assert all(speed(best, reach, here) >= speed(depth, reach, here) for depth in range(len(reach) + 1))


@pytest.mark.parametrize("rate", [0.3, 0.7, 0.95])
def test_chances_by_depth_match_the_observed_acceptance(rate: float) -> None:
    rng = random.Random(3)
    counts = AcceptanceCounts()
    acceptance = Acceptance(counts)
    for _ in range(4000):
        accepted = 0
        while accepted < 6 and rng.random() < rate:
            accepted += 1
        report = StepReport(verified=6, accepted=accepted, verified_depth=6, ranks=bytes([0] * accepted))
        acceptance.observe(report)
        counts.observe(report)
    reach = acceptance.reach(6)
    for depth, chance in enumerate(reach, 1):
        assert chance == pytest.approx(rate**depth, abs=0.06)
    assert acceptance.width(0.98) == 1
    assert AcceptanceCounts(counts.values()).values() == counts.values()


def test_a_rank_that_is_rarely_committed_is_left_out_of_the_width() -> None:
    counts = AcceptanceCounts()
    for rank in [0] * 90 + [1] * 9 + [5]:
        counts.observe(StepReport(verified=8, accepted=1, verified_depth=1, ranks=bytes([rank])))
    acceptance = Acceptance(counts)
    assert [acceptance.width(share) for share in (0.5, 0.95, 0.98, 1.0)] == [1, 2, 2, 6]
    assert Acceptance(AcceptanceCounts()).width(0.98) == 16  # nothing is known: all that may be


def test_a_step_spent_on_a_prompt_changes_no_estimate() -> None:
    gamma = Goodput(CEILINGS)
    before = gamma.plan()
    for _ in range(100):
        gamma.observe(replace(StepReport(verified=4, verified_depth=4), elapsed_us=0))
    assert gamma.plan() is before
