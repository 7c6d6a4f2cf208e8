"""Gamma policies follow acceptance, do not flip, and count their versions."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.control.depth.policies import POLICIES, AcceptanceEMA, GammaPolicy, policy
from outrider.core.session.contract import Plan, StepReport
from outrider.errors import InvalidRequest

CEILINGS = Plan(depth=12, nodes=32)

reports = st.builds(
    StepReport, verified=st.integers(0, 20), accepted=st.integers(0, 12), verified_depth=st.integers(0, 12)
)


def _run(gamma: GammaPolicy, rate: float, steps: int, rng: random.Random) -> list[Plan]:
    """Steps that each accept another token with chance `rate`, as deep as the plan allows."""
    plans = []
    for _ in range(steps):
        depth = gamma.plan().depth
        accepted = 0
        while accepted < depth and rng.random() < rate:
            accepted += 1
        gamma.observe(StepReport(verified=depth, accepted=accepted, verified_depth=depth))
        plans.append(gamma.plan())
    return plans


def test_ema_falls_when_no_draft_is_accepted_and_recovers_when_all_are() -> None:
    gamma = AcceptanceEMA(CEILINGS)
    rng = random.Random(1)
    assert gamma.plan().depth == 12
    assert _run(gamma, 0.0, 100, rng)[-1].depth == 2
    assert _run(gamma, 1.0, 200, rng)[-1].depth == 12


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.7, 0.85])
def test_ema_does_not_flip_on_steady_acceptance(rate: float) -> None:
    gamma = AcceptanceEMA(CEILINGS)
    rng = random.Random(7)
    _run(gamma, rate, 100, rng)
    plans = _run(gamma, rate, 1000, rng)
    changes = plans[-1].version - plans[0].version
    assert changes <= 12, f"{changes} changes in 1000 steps"


def test_ema_keeps_a_depth_for_the_dwell() -> None:
    gamma = AcceptanceEMA(CEILINGS, dwell=32)
    rng = random.Random(3)
    changed = [
        step
        for step, (before, after) in enumerate(pairwise(_run(gamma, 0.5, 2000, rng) + _run(gamma, 0.9, 2000, rng)))
        if before != after
    ]
    assert changed
    assert all(later - earlier >= 32 for earlier, later in pairwise(changed))


def test_steps_without_verified_nodes_leave_the_ema_unchanged() -> None:
    gamma = AcceptanceEMA(CEILINGS)
    for _ in range(500):
        gamma.observe(StepReport(verified=0, accepted=0))
    assert gamma.plan() == AcceptanceEMA(CEILINGS).plan()


@given(st.sampled_from(sorted(POLICIES)), st.integers(0, 64), st.lists(reports, max_size=200))
def test_every_policy_stays_within_its_ceilings_and_counts_its_changes(
    name: str, depth: int, steps: list[StepReport]
) -> None:
    ceilings = Plan(depth=depth, width=3, nodes=24, wait_us=1000)
    gamma = policy(name, ceilings)
    before = gamma.plan()
    for report in steps:
        gamma.observe(report)
        after = gamma.plan()
        assert (after.version > before.version) == (after != before)
        assert after.depth <= depth
        assert after.nodes <= ceilings.nodes
        before = after
    if name == "off":
        assert before.depth == before.nodes == 0


def test_no_depth_or_no_nodes_is_no_speculation() -> None:
    for ceilings in (Plan(depth=0, nodes=32), Plan(depth=8, nodes=0)):
        assert policy("ema", ceilings).plan().depth == 0


def test_an_unknown_policy_is_refused_with_the_known_names() -> None:
    with pytest.raises(
        InvalidRequest, match="'best', must be one of ema, fixed, goodput, heuristic, off, rounds"
    ) as caught:
        policy("best", CEILINGS)
    assert caught.value.field == "speculation.policy"
