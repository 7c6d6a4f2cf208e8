"""Steps are held back for what is worth the time, and no longer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from outrider.core.control.arrival_model import ArrivalPatterns, Arrivals
from outrider.core.control.budget import VerificationBudget
from outrider.core.control.drafting_terms import DraftingTerms
from outrider.core.control.hold_policy import HoldPolicy
from outrider.core.control.overlap import OverlapMode
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
    arrivals = Arrivals(ArrivalPatterns.unknown())
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


def test_a_delta_that_always_comes_in_time_is_waited_for_a_quarter_longer() -> None:
    assert hold(held()) == pytest.approx(1.25 * DELAY_S, rel=0.02)


def test_a_delta_whose_delay_varies_is_waited_for_up_to_twice_as_long() -> None:
    uneven = held(delays=tuple(DELAY_S * (0.6 if number % 2 else 1.4) for number in range(40)))
    assert 1.7 * DELAY_S < hold(uneven) <= 2.3 * DELAY_S
