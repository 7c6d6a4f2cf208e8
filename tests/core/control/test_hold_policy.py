"""Steps are held back for what is worth the time, and no longer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from outrider.core.control.arms.arm import OverlapMode
from outrider.core.control.cost.budget import VerificationBudget
from outrider.core.control.drafting_terms import DraftingTerms
from outrider.core.control.holds.arrival_model import ArrivalPatterns, Arrivals
from outrider.core.control.holds.hold_policy import HoldPolicy
from outrider.core.session.contract import Plan

DELAY_S, GAIN = 0.01, 1.0  # of the first delta after a commit
BUDGET = VerificationBudget(0, 1.0, 0.02, 1.0)  # a token in 20 ms


@dataclass
class Held:
    """A session whose drafter has always sent one delta after each commit."""

    terms: DraftingTerms
    arrivals: Arrivals
    greedy: bool = False
    awaited: bool = True
    awaiting_depth: bool = False


def held(mode: OverlapMode = OverlapMode.TURNS, delays: tuple[float, ...] = (DELAY_S,) * 40) -> Held:
    arrivals = Arrivals(ArrivalPatterns())
    now = 0.0
    for delay in delays:
        now += 1.0
        arrivals.restart(now, 1.0)
        arrivals.arrived(now + delay, 1.0 + GAIN, passing=False)
    arrivals.wait(trial=False)  # so that no trial is due
    arrivals.restart(now + 1.0, 1.0)
    terms = DraftingTerms(Plan(version=1, depth=8, wait_us=1_000_000), drawn=False)
    terms.set_overlap_mode(mode)
    terms.committed_at = now + 1.0
    return Held(terms, arrivals)


def hold(session: Held, tokens_per_s: float = 0.0) -> float:
    return HoldPolicy().hold_seconds([session], BUDGET, session.terms.committed_at, tokens_per_s)


def test_a_delta_that_brings_more_than_the_step_and_the_verifier_would_is_waited_for() -> None:
    assert hold(held()) > DELAY_S
    assert hold(held(), tokens_per_s=0.9 * GAIN / DELAY_S) > DELAY_S
    assert hold(held(), tokens_per_s=1.1 * GAIN / DELAY_S) == 0.0


def test_no_step_is_held_while_drafters_draft_ahead() -> None:
    assert hold(held(OverlapMode.AHEAD)) == 0.0


def test_a_punctual_delta_is_waited_for_a_quarter_longer_than_its_delay() -> None:
    assert hold(held()) == pytest.approx(1.25 * DELAY_S, rel=0.02)


def test_a_delta_whose_delay_varies_is_waited_for_up_to_twice_as_long() -> None:
    uneven = held(delays=tuple(DELAY_S * (0.6 if number % 2 else 1.4) for number in range(40)))
    assert 1.7 * DELAY_S < hold(uneven) <= 2.3 * DELAY_S


def begins(delay: float, *, resting: bool = False) -> Held:
    """A session whose drafter begins, as drafters of others have: the first delta came after `delay`."""
    session = held()
    for _ in range(10):
        session.arrivals.start()
        session.arrivals.restart(0.0, 1.0)
        session.arrivals.arrived(delay, 1.0 + GAIN, passing=True)
    session.arrivals.start()
    session.arrivals.restart(session.terms.committed_at, 1.0, resting=resting)
    return session


def test_a_drafter_in_prefill_is_awaited_when_less_than_a_step_is_left() -> None:
    step, rate = BUDGET.seconds, 2.0 / BUDGET.seconds
    assert hold(begins(0.25 * step), rate) > 0.25 * step
    slow = begins(3.0 * step)
    assert hold(slow, rate) == 0.0
    slow.arrivals.restart(slow.terms.committed_at + step, 1.0)  # it goes on reading
    slow.terms.committed_at += step
    assert hold(slow, rate) == 0.0
    slow.terms.committed_at += 1.75 * step
    slow.arrivals.restart(slow.terms.committed_at, 1.0)
    assert hold(slow, rate) > 0.25 * step


def test_a_drafter_whose_rest_ends_with_the_next_commit_is_not_awaited_before() -> None:
    rate = 2.0 / BUDGET.seconds
    assert hold(begins(0.1 * DELAY_S, resting=True), rate) == 0.0
    assert hold(begins(0.1 * DELAY_S), rate) > 0.0


def test_a_drafter_of_which_nothing_is_known_is_awaited_for_the_time_of_a_step() -> None:
    session = held()
    session.arrivals = Arrivals(ArrivalPatterns())
    session.arrivals.restart(session.terms.committed_at, 1.0)
    assert hold(session) == pytest.approx(BUDGET.seconds)


def test_a_drafter_that_is_late_is_tried_as_any_other_is() -> None:
    step, patterns = BUDGET.seconds, ArrivalPatterns()
    for known in (False, True):
        session = held()
        session.arrivals = Arrivals(patterns)
        if known:
            session.arrivals.restart(0.0, 1.0)
            session.arrivals.arrived(3.0 * step, 1.0 + GAIN, passing=True)
            session.arrivals.start()
        waits = []
        for _ in range(40):
            session.terms.committed_at += step
            session.arrivals.restart(session.terms.committed_at, 1.0)
            waits.append(hold(session, 2.0 / step))
        assert sum(wait > 0.0 for wait in waits) in range(2, 8)
