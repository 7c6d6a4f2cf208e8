"""The governor finds the fastest way of working, and loses next to nothing where none is faster than plain decoding."""

from __future__ import annotations

from statistics import mean

import pytest

from outrider.core.control.arms.arm import PLAIN, Arm, OverlapMode, StepOutcome, VerifierLoad
from outrider.core.control.cost.plain_pace import StepWork
from tests.core.control.plant import Plant, Speedup

CALLERS = [1, 2, 4, 8, 16, 32]
TURNS = OverlapMode.TURNS
WORST = 0.965  # 2 % of ten seconds, and what a step or two overdraw


def in_proportion(gain: float, **other: float) -> Speedup:
    """The speedup of all sessions' drafts in turns, or as `ahead`, and of a share of them in proportion."""
    return lambda arm, _: 1.0 + (other.get(arm.mode.value, gain) if arm.denominator else 0.0) / max(1, arm.denominator)


@pytest.mark.parametrize("sessions", CALLERS)
@pytest.mark.parametrize("gain", [-0.5, -0.2, -0.05])
def test_no_ten_seconds_lose_more_than_the_bound_where_drafts_do_not_pay(sessions: int, gain: float) -> None:
    plant = Plant(sessions, in_proportion(gain), seed=sessions).run(90.0)
    assert plant.worst_window() > WORST
    assert plant.over_plain() > 0.98


@pytest.mark.parametrize("sessions", CALLERS[:-1])
def test_drafts_that_pay_are_found_within_half_a_minute(sessions: int) -> None:
    plant = Plant(sessions, in_proportion(1.0, ahead=0.3), seed=sessions).run(60.0)
    assert plant.over_plain(30.0) > (1.7 if sessions < 16 else 1.4)  # of 2: there a step takes 45 ms
    assert plant.worst_window() > WORST


def test_a_single_session_is_drafted_for_at_once() -> None:
    plant = Plant(1, in_proportion(1.0, ahead=0.3)).run(10.0)
    assert plant.over_plain() > 0.9 * Plant(1, in_proportion(1.0, ahead=0.3)).run(60.0).over_plain(10.0)


@pytest.mark.parametrize("sessions", [1, 4, 8])
def test_the_faster_mode_is_found(sessions: int) -> None:
    plant = Plant(sessions, in_proportion(0.1, ahead=0.8), seed=sessions).run(90.0)
    assert plant.over_plain(60.0) > 1.6


def test_drafting_ahead_is_tried_first_when_turns_stop_paying() -> None:
    """As when the link to a drafter becomes long."""
    plant = Plant(
        1, lambda arm, now: 1.0 if not arm.denominator else 1.6 if (arm.mode is TURNS) is (now < 20.0) else 0.7
    )
    plant.run(35.0)
    drafted = [arm for now, arm in plant.arms if now > 22.0 and arm != PLAIN]
    assert drafted[0].mode is OverlapMode.AHEAD
    assert plant.over_plain(20.0, 30.0) > WORST
    assert plant.run(20.0).over_plain(40.0) > 1.4


def test_turns_stopped_by_the_losses_of_a_trial_are_tried_first() -> None:
    """Drafting ahead empties the budget at its first trial, and for a second after it turns lose, too."""
    trial_s = 0.0

    def speedup(arm: Arm, now: float) -> float:
        nonlocal trial_s
        if arm.mode is OverlapMode.AHEAD:
            trial_s = now
            return 0.2
        return 1.0 if not arm.denominator else 0.6 if 0.0 < now - trial_s < 1.0 < trial_s else 1.6

    plant = Plant(1, speedup).run(8.0)
    assert trial_s
    stopped = next(now for now, arm in plant.arms if now > trial_s and arm == PLAIN)
    plant.run(40.0)
    assert next(arm for now, arm in plant.arms if now > stopped and arm != PLAIN) == Arm(TURNS, 1)


@pytest.mark.parametrize("sent", [12.0, 1.0])
def test_a_slow_step_ends_turns_unless_pending_drafts_make_up_for_it(sent: float) -> None:
    plant = Plant(1, in_proportion(0.5), noise=0.0).run(2.0)
    governor = plant.governor
    assert governor.arm == Arm(TURNS, 1)
    switches = governor.switches

    def step(seconds: float, expected: float, drafting: int) -> None:
        work = StepWork(1, 0, expected)
        governor.observe(plant.load, StepOutcome(work, expected, seconds, 1, drafting))

    step(governor.budget.left_s + 0.05, 1.0, 1)
    assert governor.limited
    assert governor.arm == PLAIN
    step(0.02, sent, 1)
    assert governor.arm == (Arm(TURNS, 1) if sent > 1.0 else PLAIN)
    for _ in range(4):
        step(0.0135, 1.0, 0)
    assert governor.switches - switches == (sent == 1.0)


@pytest.mark.parametrize("name", ["rest", "turns", "ahead", "turns 1/8", "ahead 1/2"])
def test_a_pinned_arm_stays_at_any_cost(name: str) -> None:
    arm = Arm.parse(name)
    assert str(arm) == name
    plant = Plant(8, in_proportion(-0.5), pinned=arm).run(30.0)
    assert {used for _, used in plant.arms} == {arm}
    assert not plant.governor.limited
    assert plant.governor.reason == "the configuration has pinned it"


def test_a_share_is_kept_where_more_would_not_pay() -> None:
    speeds = {8: 1.1, 4: 1.2, 2: 0.8, 1: 0.6}
    plant = Plant(8, lambda arm, _: speeds[arm.denominator], seed=2).run(90.0)
    assert plant.over_plain(40.0) > 1.1
    assert plant.worst_window() > WORST


def test_an_arm_that_stops_paying_is_left_at_once_and_found_again_when_it_pays() -> None:
    plant = Plant(4, lambda arm, now: 1.6 if now < 30.0 or now > 60.0 else 0.6, seed=3).run(40.0)
    assert plant.over_plain(20.0, 30.0) > 1.4
    assert plant.over_plain(30.0, 40.0) > WORST
    plant.run(110.0)
    assert plant.over_plain(110.0) > 1.4


def test_equally_fast_arms_are_not_exchanged() -> None:
    switches = [Plant(8, in_proportion(0.0), seed=seed).run(60.0).governor.switches for seed in range(8)]
    assert sum(switches) < 16  # in eight minutes


@pytest.mark.parametrize("seed", range(4))
def test_a_machine_that_drifts_does_not_mislead(seed: int) -> None:
    plant = Plant(8, in_proportion(0.0), seed=seed, drift=0.2).run(60.0)
    assert plant.worst_window() > WORST - 0.01
    assert plant.governor.switches < 60.0 / 5.0


def test_an_arm_with_a_small_gain_is_found_in_noise_and_survives_trials_of_others() -> None:
    """Four sessions, as they were measured: a quarter of them brings nothing, and drafting ahead loses."""
    gains = {"turns": {4: -0.01, 2: 0.07, 1: 0.16}, "ahead": {4: -0.04, 2: -0.1, 1: -0.15}}

    def speedup(arm: Arm, _: float) -> float:
        return 1.0 + (gains[arm.mode.value][arm.denominator] if arm.denominator else 0.0)

    plants = [Plant(4, speedup, seed, noise=0.25, reading_s=0.03).run(120.0) for seed in range(8)]
    assert mean(plant.share_of_time(60.0, Arm(TURNS, 1)) for plant in plants) > 0.4


def test_drafters_are_charged_for_their_prefill() -> None:
    """A second of reading in all, of which the budget allows an eighth at once."""
    plant = Plant(16, in_proportion(-0.3), seed=1, reading_s=0.06).run(60.0)
    assert plant.worst_window() > WORST - 0.01


def test_an_unknown_load_begins_with_the_usual_arm_of_its_neighbours() -> None:
    plant = Plant(4, in_proportion(1.0, ahead=0.3), seed=1).run(40.0)
    usual = plant.governor.estimates()["loads"][0]["usual"]
    assert usual == "turns"
    governor = plant.governor
    governor.begin(VerifierLoad(3, greedy=False, representative=True))
    assert governor.arm == PLAIN
    assert governor.estimates()["loads"][-1]["usual"] == str(PLAIN)


def test_new_drafters_are_tried_soon() -> None:
    plant = Plant(8, in_proportion(-0.4), seed=5).run(120.0)
    before = plant.share_of_time(100.0)
    plant.speedup = in_proportion(1.0)
    plant.governor.reconsider()
    plant.run(60.0)
    assert before > 0.8
    assert plant.over_plain(150.0) > 1.4
