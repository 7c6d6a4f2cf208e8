"""No token lost, repeated or changed; the log never behind what a client saw; no two owners append."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.life import Life
from tests.model.routing import stand_in

QUICK = settings(
    max_examples=120,
    stateful_step_count=45,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
LONG = settings(
    QUICK, max_examples=15_000, stateful_step_count=80, derandomize=False, phases=[Phase.generate, Phase.shrink]
)


class Unsteady(Life):
    """Every verifier has its own roundings: only what was logged counts."""

    steady = False


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


def test_every_client_gets_the_one_true_text() -> None:
    run_state_machine_as_test(Life, settings=QUICK)


def test_logged_tokens_stay_although_verifiers_disagree() -> None:
    run_state_machine_as_test(Unsteady, settings=QUICK)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("life", [Life, Unsteady])
def test_a_long_run_finds_no_violation(life: type[Life]) -> None:
    run_state_machine_as_test(life, settings=LONG)


def test_a_request_whose_session_redis_lost_at_its_begin_is_sent_again() -> None:
    """Found by a run: its other call had begun it, Redis lost that, and it received the error of a lost race."""
    life = Unsteady()
    life.begin(words=1, stop=(), router=0, count=1, seed=0)
    life.hang_up(pick=0, router=0)
    life.save()
    life.answer_badly(outcome="lost", pick=0)
    life.go_on(count=1, seed=0)
    life.ask(router=0, stop=(), words=1)
    life.answer_badly(outcome="lost", pick=0)
    for pick in (0, 1, 0):
        life.hang_up(pick=pick, router=0)
    life.go_on(count=19, seed=1067)
    life.lose()
    life.go_on(count=5, seed=1)
    life.teardown()
