"""Which way of working is kept."""

import itertools

import pytest

from outrider.core.ways import Rivals, Speed, Way


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


def run_rivals(rivals: Rivals, seconds: float, speeds: dict[Way, float]) -> list[Way]:
    """The way of each step for so long, if a step of a hundredth of a second does as much as these speeds say."""
    said = []
    for _ in range(round(seconds * 100)):
        rivals.observe(speeds[rivals.way] / 100, 0.01)
        said.append(rivals.way)
    return said


@pytest.mark.parametrize("best", Way)
@pytest.mark.parametrize("first", Way)
def test_of_the_ways_the_fastest_is_kept_and_the_others_cost_a_small_share(first: Way, best: Way) -> None:
    speeds = dict.fromkeys(Way, 70.0) | {best: 100.0}
    rivals = Rivals(first)
    run_rivals(rivals, 2.0, speeds)
    said = run_rivals(rivals, 300.0, speeds)
    assert set(said) == set(Way)
    done = sum(speeds[way] for way in said)
    assert done > (1 - 3 * Rivals.LOSS) * len(said) * 100.0


def test_what_was_slower_is_taken_once_it_is_faster() -> None:
    rivals = Rivals(Way.TURNS)
    assert run_rivals(rivals, 5, {Way.TURNS: 100.0, Way.AHEAD: 80.0, Way.REST: 40.0})[-1] is Way.TURNS
    assert run_rivals(rivals, 60, {Way.TURNS: 20.0, Way.AHEAD: 30.0, Way.REST: 50.0})[-1] is Way.REST
    assert run_rivals(rivals, 60, {Way.TURNS: 20.0, Way.AHEAD: 70.0, Way.REST: 50.0})[-1] is Way.AHEAD


def test_a_trial_is_short_when_it_is_clear_or_many_tokens_come_a_step() -> None:
    for usual, other, longest in ((1.0, 0.5, 0), (1.0, 0.9, 1), (100.0, 90.0, 0)):
        rivals = Rivals(Way.TURNS)
        said = run_rivals(rivals, 2.0, {Way.TURNS: 100 * usual, Way.AHEAD: 100 * other, Way.REST: 100 * other})
        trial = list(
            itertools.takewhile(
                lambda way: way is Way.AHEAD, itertools.dropwhile(lambda way: way is not Way.AHEAD, said)
            )
        )
        assert len(trial) == Rivals.SETTLING + Rivals.PROOF[longest]


def test_a_trial_does_not_count_while_drafters_read_what_they_missed() -> None:
    rivals = Rivals(Way.REST)
    for _ in range(1000):
        reading = rivals.way is not Way.REST and rivals._steps < Rivals.STARTING
        rivals.observe(0.1 if reading else 1.0 if rivals.way is Way.REST else 2.0, 1.0)
    assert rivals.way is not Way.REST


def test_steps_that_bring_nothing_are_no_fault() -> None:
    rivals = Rivals(Way.TURNS)
    assert set(run_rivals(rivals, 20.0, dict.fromkeys(Way, 0.0))) == set(Way)


def test_both_speeds_are_told_once_resting_was_found_to_be_faster_and_not_while_it_is_tried() -> None:
    rivals = Rivals(Way.TURNS)
    speeds = {Way.TURNS: 80.0, Way.AHEAD: 60.0, Way.REST: 100.0}
    while rivals.way is not Way.REST:
        run_rivals(rivals, 0.01, speeds)
    run_rivals(rivals, 0.05, speeds)
    assert rivals.rates == (0.0, 0.0)
    run_rivals(rivals, 5.0, speeds)
    assert rivals.rates == (pytest.approx(100.0), pytest.approx(80.0))
    assert rivals.inherited().rates == (0.0, 0.0)  # with other sessions it may be otherwise
    while rivals.way is not Way.REST:
        run_rivals(rivals, 0.01, speeds)
    run_rivals(rivals, 0.5, {**speeds, Way.REST: 50.0})
    assert rivals.way is Way.REST
    assert rivals.rates == (0.0, 0.0)  # what was measured of the others is from when it was faster
    run_rivals(rivals, 60.0, {**speeds, Way.TURNS: 200.0})
    assert rivals.rates == (0.0, 0.0)
