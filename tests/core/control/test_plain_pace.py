"""What plain decoding would take: by the sweep at first, then by what plain steps took."""

from __future__ import annotations

import random

import pytest

from outrider.core.control.cost.budget import COST
from outrider.core.control.cost.plain_pace import PlainPace, StepWork

SWEEP = [(1, 0.010), (64, 0.073)]  # a millisecond for each row more


def step(sessions: int, tokens: float | None = None, read: int = 0) -> StepWork:
    return StepWork(sessions, read, sessions if tokens is None else tokens)


def test_work_takes_as_many_plain_steps_as_it_has_tokens_for_each_session() -> None:
    pace = PlainPace(SWEEP)
    assert pace.seconds(step(4)) == pytest.approx(0.013 + COST.overhead_s)
    assert pace.seconds(step(4, 10)) == pytest.approx(2.5 * (0.013 + COST.overhead_s))
    assert pace.seconds(step(4, read=16)) == pytest.approx(0.029 + COST.overhead_s)
    assert pace.seconds(step(0, 0, 16)) == pytest.approx(0.025 + COST.overhead_s)


def test_only_plain_steps_count_for_the_plain_pace_and_other_loads_begin_with_it() -> None:
    pace = PlainPace(SWEEP)
    for _ in range(2000):
        pace.observe(step(4), 2 * (0.013 + COST.overhead_s), plain=True)
        pace.observe(step(4), 1.0, plain=False)
    assert pace.seconds(step(4)) == pytest.approx(2 * (0.013 + COST.overhead_s), rel=1e-3)
    assert pace.seconds(step(16)) == pytest.approx(2 * (0.025 + COST.overhead_s), rel=1e-3)
    (known,) = pace.estimates()
    assert known["tokens_per_s"] == pytest.approx(4 / pace.seconds(step(4)))


def test_a_stall_counts_as_a_step_of_twice_the_time() -> None:
    pace = PlainPace(SWEEP)
    before = pace.seconds(step(1))
    pace.observe(step(1), 60.0, plain=True)
    assert before < pace.seconds(step(1)) < 1.25 * before


@pytest.mark.parametrize(("every", "reads"), [(10, (0, 20, 40)), (1, (20, 40))])
def test_cheap_prefill_is_told_apart_from_decoding(every: int, reads: tuple[int, ...]) -> None:
    """As on a server whose prompts are read in every tenth step, or in every step."""

    def truth(read: int) -> float:
        return 1.2 * (0.017 + COST.overhead_s) + 0.6 * 0.001 * read

    found: list[tuple[float, bool]] = []
    for seed in range(50):
        pace, draws = PlainPace(SWEEP), random.Random(seed)
        for number in range(500):
            read = draws.randint(20, 40) if number % every == 0 else 0
            pace.observe(step(8, read=read), truth(read) * draws.gauss(1.0, 0.05), plain=True)
        for read in reads:
            work = step(8, read=read)
            found.append((pace.seconds(work) / truth(read), pace.least_seconds(work) < truth(read)))
    assert sum(ratio for ratio, _ in found) / len(found) == pytest.approx(1.0, abs=0.01)
    assert all(0.9 < ratio < 1.1 for ratio, _ in found)
    assert sum(held for _, held in found) / len(found) > 0.95


@pytest.mark.parametrize("work", [step(0, 0), step(3, 0)])
def test_a_step_without_work_shows_nothing(work: StepWork) -> None:
    pace = PlainPace(SWEEP)
    pace.observe(work, 0.02, plain=True)
    assert pace.estimates() == []


def test_a_step_after_a_pause_does_not_make_its_time_certain() -> None:
    pace = PlainPace(SWEEP)
    for _ in range(100):
        pace.observe(step(1), 0.0115, plain=True)
        pace.observe(step(1), 0.0125, plain=True)
    certain = pace.seconds(step(1)) - pace.least_seconds(step(1))
    for _ in range(1000):
        pace.observe(step(1), 1.0, plain=False)
    pace.observe(step(1), 0.0125, plain=True)
    assert pace.seconds(step(1)) - pace.least_seconds(step(1)) > 3.0 * certain


@pytest.mark.parametrize("deviation", [0.02, 0.2])
def test_the_lower_bound_holds_at_its_stated_rate(deviation: float) -> None:
    """The true time is below the lower bound in 2.5 % of all cases; at most 4 % are tolerated."""
    truth, below, draws = 0.010 + COST.overhead_s, 0, random.Random(1)
    for _ in range(1000):
        pace = PlainPace(SWEEP)
        for _ in range(60):
            pace.observe(step(1), truth * max(0.5, draws.gauss(1.0, deviation)), plain=True)
        below += truth < pace.least_seconds(step(1))
    assert below < 40


def test_old_observations_fade_with_time_and_not_only_with_steps() -> None:
    slow, pace = 2 * (0.010 + COST.overhead_s), PlainPace(SWEEP)
    for _ in range(200):
        pace.observe(step(1), 0.010 + COST.overhead_s, plain=True)
    for _ in range(150):
        pace.observe(step(1), 1.0, plain=False)
    for _ in range(10):
        pace.observe(step(1), slow, plain=True)
    assert pace.seconds(step(1)) == pytest.approx(slow, rel=0.1)
