"""The budget of delay bounds what speculation may cost, whatever steps take."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.core.control.arms.delay_budget import DELAY, DelayBudget, DelayTuning, Recovery

STEP_S = 0.1
times = st.floats(0.001, STEP_S)


@given(st.lists(st.tuples(times, st.floats(-1.0, 1.0)), max_size=400), st.floats(1.0, 10.0))
def test_no_window_loses_more_than_the_budget_and_one_step(steps: list[tuple[float, float]], span: float) -> None:
    """The adversary chooses the time of each step, and its delay as a share of it; speculation stops when the budget is
    empty."""
    budget, delays = DelayBudget(), []
    for seconds, share in steps:
        delay = 0.0 if budget.empty else share * seconds
        budget.spend(seconds, delay)
        delays.append((seconds, delay))
    for first in range(len(delays)):
        passed = lost = 0.0
        for seconds, delay in delays[first:]:
            passed, lost = passed + seconds, lost + delay
            if passed > span:
                break
            assert lost <= DELAY.capacity_s + DELAY.refill * passed + STEP_S + 1e-9


@given(st.lists(times, min_size=1, max_size=50))
def test_a_gain_is_worth_nothing_later(gains: list[float]) -> None:
    budget = DelayBudget()
    for seconds in gains:
        budget.spend(seconds, -seconds)
    assert budget.left_s == DELAY.capacity_s


def test_where_steps_are_long_a_budget_holds_three_of_them() -> None:
    budget = DelayBudget()
    budget.follow(0.02)
    assert budget.capacity_s == DELAY.capacity_s
    budget.follow(0.143)
    for _ in range(3):
        assert not budget.empty
        budget.spend(0.0, 0.143)
    assert budget.empty
    budget.follow(0.02)  # another model's steps, of another load
    assert budget.left_s < -0.3


def test_an_empty_budget_recovers_with_time() -> None:
    budget, recovery = DelayBudget(DelayTuning(capacity_s=0.1, refill=0.01)), Recovery()
    budget.spend(1.0, 0.11)
    assert (budget.empty, recovery.recovered(budget)) == (True, False)
    budget.spend(2.0, 0.0)
    assert (budget.empty, recovery.recovered(budget)) == (False, False)
    budget.spend(1.1, 0.0)
    assert recovery.recovered(budget)


def test_a_budget_that_empties_again_before_it_was_full_must_recover_twice_as_far() -> None:
    budget, recovery, of_another_load = DelayBudget(), Recovery(), Recovery()

    def recovers_at(level: float) -> bool:
        budget.spend(0.0, budget.left_s - level)
        return recovery.recovered(budget)

    for share in (0.3, 0.6, 1.0, 1.0):
        assert not recovers_at(-0.001)
        assert not recovers_at(0.99 * share * DELAY.capacity_s)
        assert of_another_load.recovered(budget) is (share > 0.3)
    assert recovers_at(DELAY.capacity_s)
    assert not recovers_at(-0.001)
    assert recovers_at(0.31 * DELAY.capacity_s)
