"""How far it pays to draft, by the times of an engine's steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import pytest

from outrider.core.control.arms.steering import SessionTokens
from outrider.core.control.drafting_terms import DraftingTerms
from outrider.core.control.holds.arrival_model import Arrivals
from outrider.core.control.holds.hold_policy import HoldPolicy
from outrider.core.session.contract import Plan, PlanOverlap
from outrider.upstream.foreign_session import NONE, DraftChain, ForeignSession, Row
from outrider.upstream.step_control import EngineStep, StepControl

PLAN = Plan(1, depth=8, width=2, nodes=64, wait_us=0, overlap=PlanOverlap.MEASURED)


class Steered:
    """What control uses of a session. Its drafts are right at random."""

    drafting = True

    def __init__(self, *, greedy: bool = True, representative: bool = True) -> None:
        self.greedy = greedy
        self.representative = representative
        self.terms = DraftingTerms(PLAN, drawn=False)


def simulate(
    seconds_of: Callable[[int], float],
    chance: float,
    *,
    claimed: float | None = None,
    steps: int = 3000,
    sessions: int = 1,
    control: StepControl | None = None,
    **kind: bool,
) -> tuple[StepControl, float, float]:
    """Run steps whose pass over n tokens takes `seconds_of(n)`, and whose drafts are each right by chance; drafters
    claim that of others if `claimed` says so. Return the control, and the tokens a second of the last half of the time,
    with plain decoding's.
    """
    control, rng, claimed = control or StepControl(), random.Random(7), claimed or chance
    rows = [cast(ForeignSession, Steered(**kind)) for _ in range(sessions)]
    control.on_opened(rows)
    given = [NONE] * sessions
    done: list[tuple[float, int]] = []
    for _ in range(steps):
        commits = []
        for row, chain in zip(rows, given, strict=True):
            accepted = next((place for place in range(len(chain.tokens)) if rng.random() > chance), len(chain.tokens))
            commits.append(
                SessionTokens(row, 1 + accepted, 1.0 + sum(claimed**level for level in range(1, 1 + len(chain.tokens))))
            )
        tokens = sessions + sum(len(chain.tokens) for chain in given)
        seconds = seconds_of(tokens) * rng.uniform(0.98, 1.02)
        done.append((seconds, sum(it.tokens for it in commits)))
        control.on_step(rows, commits, EngineStep(tokens, sessions, 0, seconds))
        offers = [NONE if row.terms.resting else DraftChain((5,) * 4, (claimed,) * 4) for row in rows]
        taken = control.choose(offers).taken
        given = [DraftChain(it.tokens[:count], it.chances[:count]) for it, count in zip(offers, taken, strict=True)]
    last = done[steps // 2 :]
    speed = sum(tokens for _, tokens in last) / sum(seconds for seconds, _ in last)
    return control, speed, sessions / seconds_of(sessions)


def flat(tokens: int) -> float:
    """A pass that more tokens make little longer."""
    return 0.020 + 0.0002 * tokens


def rising(tokens: int) -> float:
    """A pass over five tokens takes a third longer than one over a single token."""
    return 0.020 + 0.002 * tokens


def steep(tokens: int) -> float:
    """A pass over five tokens takes three times as long as one over a single token."""
    return 0.020 + 0.010 * tokens


@pytest.mark.parametrize("sessions", [1, 8])
def test_drafts_are_taken_where_passes_are_flat(sessions: int) -> None:
    control, speed, plain = simulate(flat, 0.8, sessions=sessions)
    assert control.estimates()["arm"] == "ahead"
    assert speed > 2.2 * plain


@pytest.mark.parametrize("sessions", [1, 8])
@pytest.mark.parametrize(("seconds_of", "chance"), [(steep, 0.3), (flat, 0.01), (steep, 0.01)])
def test_it_is_never_slower_than_plain_decoding(
    seconds_of: Callable[[int], float], chance: float, sessions: int
) -> None:
    _, speed, plain = simulate(seconds_of, chance, sessions=sessions)
    assert speed > 0.98 * plain


def test_texts_of_other_kinds_do_not_decide() -> None:
    control, *_ = simulate(rising, 0.01, claimed=0.8, steps=1500, greedy=False, representative=False)
    assert control.estimates()["arm"] == "rest"
    _, speed, plain = simulate(rising, 0.8, steps=200, control=control)
    assert speed > 2.0 * plain


def test_chains_are_as_long_as_pays() -> None:
    control, speed, plain = simulate(steep, 0.9)
    choice = control.choose([DraftChain((5, 6, 7, 8), (0.9, 0.9, 0.05, 0.05))])
    assert choice.taken[0] in (2, 3)
    assert choice.expected == [pytest.approx(1.0 + 0.9 + 0.81 + (choice.taken[0] - 2) * 0.81 * 0.05)]
    assert control.choose([NONE, NONE]).expected == [1.0, 1.0]
    assert speed > 1.1 * plain


@pytest.mark.parametrize(
    ("delay", "gain", "waits"), [(0.004, 1.5, True), (0.008, 1.5, True), (0.015, 1.5, False), (0.030, 1.5, False)]
)
def test_a_step_waits_for_drafts_that_are_worth_its_time(delay: float, gain: float, waits: bool) -> None:
    control, *_ = simulate(flat, 0.8, steps=200)
    row = Row("row", 10, Arrivals(HoldPolicy().patterns(greedy=True)))
    now, held = 100.0, []
    for _ in range(200):
        row.drafts = row.drafts._replace(position=row.length - 1)
        row.note_drafts(NONE, now)
        held.append(control.hold_seconds([row.arrivals], [NONE], now))
        offer = DraftChain((5, 6), (gain / 2, 1.0))
        row.drafts = row.drafts._replace(arrived=now + delay)
        if held[-1] >= delay:
            row.note_drafts(offer, None)
        elif held[-1]:
            row.arrivals.give_up(now + held[-1])
        now += 0.020 + held[-1]
    mean = sum(held[100:]) / 100
    assert delay < mean < 2.0 * delay if waits else mean < 0.001


def test_steps_that_show_nothing_change_nothing() -> None:
    control = StepControl()
    row: Any = Steered()
    for step in (None, EngineStep(40, 1, 39, 0.1), EngineStep(0, 0, 0, 0.5)):
        for _ in range(20):
            control.on_step([row], [], step)
    assert control.cost is None
    assert control.choose([DraftChain((5,), (0.9,))]).taken == [0]
    assert control.choose([]).taken == []
