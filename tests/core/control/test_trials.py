"""Paired blocks show a difference that is smaller than the machine's drift, with an interval that holds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from outrider.core.control.trials import TRIALS, PairedDifference, PairedTrial, TrialSchedule, pause_after

STEPS = TRIALS.block_steps[1]


def compared(pairs: int, speed: Callable[[bool, float], float]) -> PairedTrial:
    """A trial of `pairs` pairs. `speed`: work per second of the challenger, or the usual way, after some steps."""
    trial, now = PairedTrial(PairedDifference()), 0
    while trial.blocks < 2 * pairs:
        trial.observe(speed(trial.challenged, now), 1, 1.0)
        now += 1
    return trial


def test_trial_blocks_alternate_which_arm_comes_first() -> None:
    order: list[bool] = []

    def speed(challenged: bool, now: float) -> float:
        order.append(challenged)
        return 1.0

    compared(4, speed)
    assert order[::STEPS] == [False, True, True, False, False, True, True, False]


def test_a_linear_drift_that_is_larger_than_the_difference_cancels() -> None:
    trial = compared(8, lambda challenged, now: math.exp(0.001 * now) * (1.02 if challenged else 1.0))
    assert math.exp(trial.difference.mean) == pytest.approx(1.02, rel=1e-4)
    assert trial.difference.estimates()["ratio"] == pytest.approx(1.02, rel=1e-4)


@pytest.mark.parametrize("pairs", [3, 5, 8])
def test_the_interval_of_95_percent_holds_93_to_97_percent_of_the_time(pairs: int) -> None:
    """Steps' times are log-normal, and so autocorrelated that neighbouring blocks share half of their deviation."""
    draws, held, runs = random.Random(pairs), 0, 4000
    for _ in range(runs):
        difference = PairedDifference()
        for _ in range(pairs):
            shared = draws.gauss(0.0, 0.1)
            usual, other = (shared + draws.gauss(0.0, 0.1) for _ in range(2))
            difference.observe(0.05 + other - usual)
        held += difference.low <= 0.05 <= difference.high
    assert 0.93 <= held / runs <= 0.97


def test_an_interval_needs_two_pairs_and_earlier_trials_count_half() -> None:
    difference = PairedDifference()
    difference.observe(0.1)
    assert (difference.low, difference.high) == (-math.inf, math.inf)
    assert difference.estimates()["low"] is None
    for value in (0.2, 0.3, 0.2):
        difference.observe(value)
    again = PairedTrial(difference).difference
    assert (again.pairs, again.mean) == (2.0, pytest.approx(0.2))
    turned = again.reversed()
    assert (turned.mean, turned.low, turned.high) == (-again.mean, -again.high, -again.low)


def test_a_disturbed_pair_begins_again_with_its_first_arm() -> None:
    trial = PairedTrial(PairedDifference())
    for _ in range(STEPS + 2):
        trial.observe(1.0, 1, 1.0)
    assert (trial.challenged, trial.blocks) == (True, 1)
    trial.restart_pair()
    assert (trial.challenged, trial.blocks) == (False, 0)


def test_a_trial_is_decided_by_its_interval_and_when_there_were_enough_pairs_by_its_mean() -> None:
    faster = compared(TRIALS.min_pairs, lambda challenged, now: (1.2 if challenged else 1.0) * math.exp(0.001 * now))
    assert [faster.verdict(margin, 0.0) for margin in (0.1, 0.5)] == [True, False]
    few = compared(TRIALS.min_pairs - 1, lambda challenged, _: 2.0 if challenged else 1.0)
    assert few.verdict(0.0, 0.0) is None
    draws = random.Random(1)

    def unclear(pairs: int) -> PairedTrial:
        return compared(pairs, lambda challenged, _: draws.lognormvariate(0.2 if challenged else 0.0, 1.0))

    assert unclear(TRIALS.min_pairs).verdict(0.0, 0.0) is None
    enough = unclear(TRIALS.max_pairs)
    assert enough.difference.low < 0.0 < enough.difference.high
    assert [enough.verdict(0.0, enough.difference.mean + off) for off in (-0.01, 0.01)] == [True, False]


def test_what_a_side_lost_is_the_time_that_the_other_would_not_have_taken() -> None:
    trial = PairedTrial(PairedDifference())
    trial.spend(10.0, 10.0, challenged=False)
    trial.spend(10.0, 15.0, challenged=True)
    assert trial.lasted == 25.0
    assert trial.lost(by_challenger=True) == pytest.approx(5.0)
    assert trial.lost(by_challenger=False) == 0.0


def test_pauses_make_up_for_losses_and_double_with_each_failure_up_to_a_bound() -> None:
    assert pause_after(1.0) == 1.0 / TRIALS.loss
    assert pause_after(0.0, 2.0) == 2.0 * TRIALS.apart
    schedule = TrialSchedule((4.0, 30.0))
    pauses = []
    for now in range(0, 500, 100):
        schedule.fail(now)
        pauses.append(schedule.due - now)
    assert pauses == [4.0, 8.0, 16.0, 30.0, 30.0]
    schedule.forgive(401.0)
    assert schedule.due == 405.0
    schedule.fail(500.0, lasted=1.0)
    assert schedule.due == 500.0 + TRIALS.apart
    schedule.fail(600.0, lost=1.0)
    assert schedule.due == 630.0
