"""Which steps count for the tiers that drafted them."""

from __future__ import annotations

import math

import pytest

from router.drafters.drafter_assignment import DRAFTED_FIRST, SETTLING_STEPS, TierWindow

STEP_S = 0.1


class Steps:
    """A window, and steps of STEP_S seconds that commit a token each."""

    def __init__(self) -> None:
        self.window = TierWindow(frozenset({0, 1}), frozenset({0}))
        self._now = 10.0

    def take(self, drafted: list[bool], *, resting: bool = False) -> None:
        for has_drafts in drafted:
            self.window.observe(1, self._now, drafted=has_drafts, resting=resting)
            self._now += STEP_S

    @property
    def measured(self) -> int:
        """Steps that count."""
        assert self.window.seconds == pytest.approx(self.window.tokens * STEP_S)
        return self.window.tokens


def test_a_window_begins_behind_the_first_steps_with_drafts() -> None:
    steps = Steps()
    steps.take([False] * 2 + [True] * (DRAFTED_FIRST + 4))
    assert steps.measured == 4


def test_tiers_that_draft_nothing_are_measured_too() -> None:
    steps = Steps()
    steps.take([False] * (SETTLING_STEPS + 4))
    assert steps.measured == 4


def test_a_step_without_drafts_does_not_settle_the_tiers() -> None:
    steps = Steps()
    steps.take([True] * DRAFTED_FIRST + [False, True, False])
    assert steps.measured == 2


def test_a_rest_takes_no_time_from_the_window() -> None:
    steps = Steps()
    steps.take([True] * (DRAFTED_FIRST + 2))
    steps.take([False] * 20, resting=True)
    assert (steps.measured, steps.window.rested_tokens) == (2, 20)
    assert steps.window.rested_s == pytest.approx(20 * STEP_S)
    steps.take([True] * (DRAFTED_FIRST + 2))
    assert (steps.measured, steps.window.rested_tokens, steps.window.rested_s) == (4, 0, 0.0)


def test_taking_a_window_begins_the_next_without_settling() -> None:
    steps = Steps()
    steps.take([True] * (DRAFTED_FIRST + 2))
    assert steps.window.take(math.inf) == (2, pytest.approx(2 * STEP_S), False)
    steps.take([True] * 3)
    assert steps.window.take(math.inf) == (3, pytest.approx(3 * STEP_S), False)
    assert steps.window.take(math.inf) == (0, 0.0, False)


def test_a_long_rest_replaces_the_drafted_steps() -> None:
    steps = Steps()
    steps.take([True] * (DRAFTED_FIRST + 2))
    steps.take([False] * 10, resting=True)
    assert steps.window.take(0.5) == (10, pytest.approx(10 * STEP_S), True)
    for rested in (3, 6):
        steps.take([False] * 3, resting=True)
        long = rested * STEP_S > 0.5
        assert steps.window.take(0.5) == ((6, pytest.approx(6 * STEP_S), True) if long else (0, 0.0, False))


def test_a_rest_before_the_first_draft_is_not_measured() -> None:
    steps = Steps()
    steps.take([False] * 20, resting=True)
    assert steps.window.take(0.5) == (0, 0.0, False)
