"""Which way of working is kept."""

import itertools

import pytest

from outrider.core.control.overlap import OverlapMode, OverlapSelector, Speed


def test_a_speed_is_tokens_over_time_of_the_latest_steps() -> None:
    speed = Speed()
    assert speed.per_second == 0.0
    for _ in range(10):
        speed.observe(2, 0.01)
    assert speed.per_second == pytest.approx(200.0)
    for _ in range(200):
        speed.observe(1, 0.01)
    assert speed.per_second == pytest.approx(100.0, rel=0.01)
    assert speed.steps == 210


def run_selector(selector: OverlapSelector, seconds: float, speeds: dict[OverlapMode, float]) -> list[OverlapMode]:
    """The mode of each step for so long, if each step of a hundredth of a second runs at its mode's speed."""
    modes = []
    for _ in range(round(seconds * 100)):
        selector.observe(speeds[selector.arm] / 100, 0.01)
        modes.append(selector.arm)
    return modes


@pytest.mark.parametrize("best", OverlapMode)
@pytest.mark.parametrize("first", OverlapMode)
def test_of_the_ways_the_fastest_is_kept_and_the_others_cost_a_small_share(
    first: OverlapMode, best: OverlapMode
) -> None:
    speeds = dict.fromkeys(OverlapMode, 70.0) | {best: 100.0}
    selector = OverlapSelector(first)
    run_selector(selector, 2.0, speeds)
    modes = run_selector(selector, 300.0, speeds)
    assert set(modes) == set(OverlapMode)
    done = sum(speeds[way] for way in modes)
    assert done > (1 - 3 * OverlapSelector.LOSS) * len(modes) * 100.0


def test_what_was_slower_is_taken_once_it_is_faster() -> None:
    selector = OverlapSelector(OverlapMode.TURNS)
    assert (
        run_selector(selector, 5, {OverlapMode.TURNS: 100.0, OverlapMode.AHEAD: 80.0, OverlapMode.REST: 40.0})[-1]
        is OverlapMode.TURNS
    )
    assert (
        run_selector(selector, 60, {OverlapMode.TURNS: 20.0, OverlapMode.AHEAD: 30.0, OverlapMode.REST: 50.0})[-1]
        is OverlapMode.REST
    )
    assert (
        run_selector(selector, 60, {OverlapMode.TURNS: 20.0, OverlapMode.AHEAD: 70.0, OverlapMode.REST: 50.0})[-1]
        is OverlapMode.AHEAD
    )


def test_a_trial_is_short_when_it_is_clear_or_many_tokens_come_a_step() -> None:
    for usual, other, longest in ((1.0, 0.5, 0), (1.0, 0.9, 1), (100.0, 90.0, 0)):
        selector = OverlapSelector(OverlapMode.TURNS)
        modes = run_selector(
            selector,
            2.0,
            {OverlapMode.TURNS: 100 * usual, OverlapMode.AHEAD: 100 * other, OverlapMode.REST: 100 * other},
        )
        trial = list(
            itertools.takewhile(
                lambda way: way is OverlapMode.AHEAD,
                itertools.dropwhile(lambda way: way is not OverlapMode.AHEAD, modes),
            )
        )
        assert len(trial) == OverlapSelector.SETTLING + OverlapSelector.PROOF[longest]


def test_a_trial_does_not_count_while_drafters_read_what_they_missed() -> None:
    selector = OverlapSelector(OverlapMode.REST)
    for _ in range(1000):
        reading = selector.arm is not OverlapMode.REST and selector._steps < OverlapSelector.STARTING
        selector.observe(0.1 if reading else 1.0 if selector.arm is OverlapMode.REST else 2.0, 1.0)
    assert selector.arm is not OverlapMode.REST


def test_steps_that_bring_nothing_are_no_fault() -> None:
    selector = OverlapSelector(OverlapMode.TURNS)
    assert set(run_selector(selector, 20.0, dict.fromkeys(OverlapMode, 0.0))) == set(OverlapMode)


def test_both_speeds_are_reported_once_resting_was_found_to_be_faster_and_not_while_it_is_tried() -> None:
    selector = OverlapSelector(OverlapMode.TURNS)
    speeds = {OverlapMode.TURNS: 80.0, OverlapMode.AHEAD: 60.0, OverlapMode.REST: 100.0}
    while selector.arm is not OverlapMode.REST:
        run_selector(selector, 0.01, speeds)
    run_selector(selector, 0.05, speeds)
    assert selector.rates == (0.0, 0.0)
    run_selector(selector, 5.0, speeds)
    assert selector.rates == (pytest.approx(100.0), pytest.approx(80.0))
    assert selector.warm_started().rates == (0.0, 0.0)  # with other sessions it may be otherwise
    while selector.arm is not OverlapMode.REST:
        run_selector(selector, 0.01, speeds)
    run_selector(selector, 0.5, {**speeds, OverlapMode.REST: 50.0})
    assert selector.arm is OverlapMode.REST
    assert selector.rates == (0.0, 0.0)  # what was measured of the others is from when it was faster
    run_selector(selector, 60.0, {**speeds, OverlapMode.TURNS: 200.0})
    assert selector.rates == (0.0, 0.0)
