"""What a step costs: inside the pass by its rows, outside by its sessions, of any size."""

from __future__ import annotations

import math
import random

import pytest

from outrider.core.control.cost.budget import COST, CostModel

SWEEP = [(1, 0.010), (8, 0.011), (64, 0.067)]  # a millisecond for each row above eight


def test_a_pass_larger_than_all_measured_ones_continues_the_last_slope() -> None:
    cost = CostModel(SWEEP)
    assert cost.seconds(64) == pytest.approx(0.067)
    assert cost.seconds(128) == pytest.approx(0.131)
    assert CostModel([(1, 0.01), (64, 0.01)]).seconds(128) > 0.01  # never free


@pytest.mark.parametrize("deviation", [0.1, 0.7])
def test_noise_in_frequent_sizes_does_not_move_the_estimates_of_others(deviation: float) -> None:
    """Half an hour of plain decoding with one session and two."""
    cost, chance = CostModel(SWEEP), random.Random(2)
    true = [CostModel(SWEEP).seconds(tokens) for tokens in (1, 2)]
    noise = [math.exp(chance.gauss(0.0, deviation)) for _ in range(30_000)]
    level = sum(min(2.0, it) for it in noise) / len(noise)  # about what an outlier counts as
    for step, factor in enumerate(noise):
        cost.observe(1 + step % 2, true[step % 2] * factor)
    assert cost.seconds(64) == pytest.approx(0.067 * level, rel=0.35)


def test_a_wrong_sweep_value_of_a_rare_size_is_corrected_and_kept() -> None:
    cost = CostModel(SWEEP)
    for step in range(20_000):
        cost.observe(*((64, 0.1) if step % 100 == 0 else (1, 0.01)))
    assert cost.seconds(64) == pytest.approx(0.1, rel=0.05)
    assert cost.seconds(1) == pytest.approx(0.01, rel=0.02)


def test_a_slower_machine_is_slower_at_every_size() -> None:
    cost = CostModel(SWEEP)
    for _ in range(10_000):
        cost.observe(1, 0.02)
    assert [seconds for _, seconds in cost.points()] == pytest.approx([0.02, 0.022, 0.134], rel=0.05)


def test_larger_passes_are_learned_without_changing_other_sizes() -> None:
    cost = CostModel(SWEEP)
    for _ in range(200):
        cost.observe(320, 0.067 + 0.0005 * 256)
    assert cost.seconds(320) == pytest.approx(0.195, rel=0.02)
    assert cost.seconds(64) == pytest.approx(0.067)


def test_the_time_outside_the_pass_is_fitted_by_sessions() -> None:
    cost = CostModel(SWEEP)
    assert cost.overhead(1) == cost.overhead(32) == pytest.approx(COST.overhead_s)
    for step in range(2000):
        sessions = (1, 8, 32)[step % 3]
        cost.observe_overhead(sessions, 0.0004 + 0.0001 * sessions)
    for sessions in (1, 4, 16, 32, 128):
        assert cost.overhead(sessions) == pytest.approx(0.0004 + 0.0001 * sessions, rel=0.02)


def test_a_stall_outside_the_pass_counts_as_twice_the_expected_overhead() -> None:
    cost = CostModel(SWEEP)
    cost.observe_overhead(1, 60.0)
    assert cost.overhead(1) < 2 * COST.overhead_s


def test_steps_of_one_size_show_its_level_and_no_slope() -> None:
    cost = CostModel(SWEEP)
    for _ in range(2000):
        cost.observe_overhead(8, 0.003)
    assert cost.overhead(8) == pytest.approx(0.003, rel=0.01)
    assert 0.0 <= cost.overhead(1) <= cost.overhead(64) < 0.006
