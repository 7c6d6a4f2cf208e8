"""No token lost, repeated or changed; the log never behind what a client saw; no two owners append."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.routing import stand_in
from tests.model.state_machine import ClusterMachine

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


class UnsteadyMachine(ClusterMachine):
    """Every verifier has its own roundings: only what was logged counts."""

    steady = False


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


def test_every_client_gets_the_one_true_text() -> None:
    run_state_machine_as_test(ClusterMachine, settings=QUICK)


def test_logged_tokens_stay_although_verifiers_disagree() -> None:
    run_state_machine_as_test(UnsteadyMachine, settings=QUICK)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("machine", [ClusterMachine, UnsteadyMachine])
def test_a_long_run_finds_no_violation(machine: type[ClusterMachine]) -> None:
    run_state_machine_as_test(machine, settings=LONG)


def test_a_request_whose_session_redis_lost_at_its_begin_is_sent_again() -> None:
    """Found by a run: its other call had begun it, Redis lost that, and it received the error of a lost race."""
    machine = UnsteadyMachine()
    machine.begin(words=1, stop=(), router=0, count=1, seed=0)
    machine.hang_up(pick=0, router=0)
    machine.save()
    machine.answer_badly(outcome="lost", pick=0)
    machine.go_on(count=1, seed=0)
    machine.ask(router=0, stop=(), words=1)
    machine.answer_badly(outcome="lost", pick=0)
    for pick in (0, 1, 0):
        machine.hang_up(pick=pick, router=0)
    machine.go_on(count=19, seed=1067)
    machine.lose()
    machine.go_on(count=5, seed=1)
    machine.teardown()
