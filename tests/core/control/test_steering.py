"""A verifier's sessions follow the governor's arm, and the governor sees what shows how much an arm is worth."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from outrider.core.control.arms.arm import PLAIN, Arm, OverlapMode, StepOutcome, VerifierLoad
from outrider.core.control.arms.governor import Governor
from outrider.core.control.arms.steering import SessionTokens, Steering
from outrider.core.control.cost.budget import CostModel
from outrider.core.control.cost.plain_pace import PlainPace, StepWork
from outrider.core.control.drafting_terms import DraftingTerms
from outrider.core.session.contract import OFF, Plan, PlanOverlap
from tests.core.control.plant import SteeredSession

PLAN = Plan(version=1, depth=8, nodes=16)
COST = CostModel([(1, 0.010), (64, 0.073)])


class Recorded(Governor):
    """Keeps one arm, and what it was given."""

    def __init__(self, arm: Arm) -> None:
        super().__init__(PlainPace(COST.points()))
        self.arm = arm
        self.seen: list[tuple[VerifierLoad, StepOutcome]] = []

    def begin(self, load: VerifierLoad) -> None:
        """Keep the arm."""

    def observe(self, load: VerifierLoad, step: StepOutcome) -> None:
        """Keep the arm."""
        self.seen.append((load, step))


def session(plan: Plan = PLAN, **kind: Any) -> SteeredSession:
    return SteeredSession(DraftingTerms(plan, drawn=False), **kind)


def steered(arm: Arm, sessions: list[SteeredSession]) -> tuple[Steering, Recorded]:
    governor = Recorded(arm)
    steering = Steering(governor, COST)
    for count in range(1, len(sessions) + 1):
        steering.on_opened(sessions[:count])
    return steering, governor


def modes(sessions: list[SteeredSession]) -> list[OverlapMode]:
    return [it.terms.overlap_mode for it in sessions]


def test_a_share_of_the_sessions_is_drafted_for_and_keeps_its_members() -> None:
    sessions = [session() for _ in range(8)]
    steering, governor = steered(Arm(OverlapMode.AHEAD, 4), sessions)
    drafted = [it for it in sessions if it.terms.ahead]
    assert len(drafted) == 2
    steering.apply([*reversed(sessions), session()])
    assert [it for it in sessions if it.terms.ahead] == drafted
    governor.arm = PLAIN
    steering.apply(sessions)
    assert set(modes(sessions)) == {OverlapMode.REST}


def test_plans_that_decide_themselves_are_followed_and_are_no_part_of_the_share() -> None:
    plans = [replace(PLAN, overlap=PlanOverlap.ALWAYS), replace(PLAN, overlap=PlanOverlap.ROUNDS), OFF, PLAN]
    sessions = [session(plan) for plan in plans]
    steering, governor = steered(PLAIN, sessions)
    assert modes(sessions) == [OverlapMode.AHEAD, OverlapMode.TURNS, OverlapMode.REST, OverlapMode.REST]
    steering.on_step(sessions, [SessionTokens(sessions[0], 3, 2.0)], 0, 0.1)
    assert not governor.seen  # such a step is of no arm
    steering.on_step(sessions[2:], [SessionTokens(sessions[3], 1, 1.0)], 0, 0.1)
    assert governor.seen[-1][1].eligible == 1


def test_the_governor_observes_only_representative_sessions() -> None:
    sessions = [session(), session(), session(representative=False), session(plan=OFF)]
    steering, governor = steered(Arm(OverlapMode.TURNS, 1), sessions)
    commits = [SessionTokens(it, tokens, 2.0) for it, tokens in zip(sessions, (4, 2, 100, 0), strict=True)][:3]
    steering.on_step(sessions, commits, 16, 0.1)
    load, step = governor.seen[-1]
    assert (load.sessions, load.representative) == (4, True)
    assert step == StepOutcome(StepWork(3, 16, 9.0), 6.0, 0.1, 3, 3)
    steering.on_step(sessions, commits[2:], 0, 0.1)
    assert len(governor.seen) == 1
    steering.on_step(sessions[2:3], commits[2:], 0, 0.1)
    assert governor.seen[-1][0].representative is False


def test_the_load_follows_a_crowd_at_once_and_few_sessions_smoothly() -> None:
    sessions = [session(greedy=True) for _ in range(16)]
    steering, governor = steered(PLAIN, sessions)

    def load(count: int, steps: int = 1) -> VerifierLoad:
        for _ in range(steps):
            steering.on_step(sessions[:count], [SessionTokens(sessions[0], 1, 1.0)], 0, 0.01)
        return governor.seen[-1][0]

    assert load(16).sessions == 16
    assert load(9, 3).sessions == 16
    assert load(9, 300).sessions == 8
    assert load(13, 300).sessions == 16
    assert load(1, 3).sessions == 16
    assert load(1, 300) == VerifierLoad(0, greedy=True, representative=True)


def test_a_load_is_greedy_while_most_of_its_sessions_are() -> None:
    greedy, sampled = [session(greedy=True) for _ in range(4)], [session() for _ in range(4)]
    steering, governor = steered(PLAIN, greedy)

    def kind(sessions: list[SteeredSession], steps: int) -> bool:
        for _ in range(steps):
            steering.on_step(sessions, [SessionTokens(sessions[0], 1, 1.0)], 0, 0.01)
        return governor.seen[-1][0].greedy

    assert kind(greedy, 1)
    assert kind([*greedy[:3], sampled[0]], 100)
    assert not kind([*greedy[:2], *sampled[:2]], 100)
    assert not kind([*greedy[:3], sampled[0]], 100)
    assert kind(greedy, 100)
    assert not kind(sampled, 100)


def test_a_step_that_ends_the_last_session_keeps_its_load() -> None:
    one = session(greedy=True)
    steering, governor = steered(PLAIN, [one])
    for left in ([one], []):
        steering.on_step(left, [SessionTokens(one, 1, 1.0)], 0, 0.01)
    assert governor.seen[0][0] == governor.seen[1][0] == VerifierLoad(0, greedy=True, representative=True)


def test_a_second_of_a_hold_is_worth_the_rate_of_all_sessions() -> None:
    sessions = [session() for _ in range(4)]
    steering, _ = steered(Arm(OverlapMode.TURNS, 2), sessions)
    for _ in range(100):
        steering.on_step(sessions, [SessionTokens(it, 2, 2.0) for it in sessions], 0, 0.1)
    drafted = [it for it in sessions if not it.terms.resting]
    assert sum(it.terms.time_cost_tokens_per_s for it in drafted) == pytest.approx(80.0)


def test_rates_are_reported_after_drafting_was_compared_with_plain_decoding() -> None:
    one = session()
    steering = Steering(Governor(PlainPace(COST.points())), COST)
    steering.on_opened([one])
    assert steering.rates() == (0, 0)
    for _ in range(2000):
        slow = not one.terms.resting
        steering.on_step([one], [SessionTokens(one, 1, 1.0)], 0, 0.015 if slow else 0.0115)
    plain, drafted = steering.rates()
    assert plain == pytest.approx(1000 / 0.0115, rel=0.02)
    assert 0 < drafted < plain
    assert steering.overlap_mode is OverlapMode.REST


@pytest.mark.parametrize("seed", range(6))
def test_figures_of_a_verifier_that_rests_drafters_never_show_that_drafting_is_faster(seed: int) -> None:
    """On a machine whose steps scatter, with drafts that bring about what they cost."""
    one, noise = session(), random.Random(seed)
    steering = Steering(Governor(PlainPace(COST.points())), COST)
    steering.on_opened([one])
    shown = set()
    for _ in range(4000):
        seconds = 0.0115 * math.exp(noise.gauss(0.0, 0.1)) * (1.0 if one.terms.resting else 1.01)
        steering.on_step([one], [SessionTokens(one, 1, 1.0)], 0, seconds)
        shown.add(steering.rates())
    assert len(shown) > 1
    assert all(plain >= drafted for plain, drafted in shown)
