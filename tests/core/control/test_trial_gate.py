"""What costs every step a little is tried now and then, and stays while it brings more than it costs."""

from outrider.core.control.trial_gate import GATE, TrialGate
from outrider.core.control.trials import TRIALS


def run(gate: TrialGate, steps: int, gain: float, cost_tokens: float, committed: int = 1) -> list[bool]:
    """Steps in which it is taken if it is to be, with a gain that never changes."""
    taken = []
    for _ in range(steps):
        taken.append(gate.takes(cost_tokens, trial=True))
        if taken[-1]:
            gate.observe(gain, cost_tokens)
        else:
            gate.observe_unused(committed)
    return taken


def test_a_proposer_that_pays_stays_on() -> None:
    assert all(run(TrialGate(), 1000, gain=0.3, cost_tokens=0.2))


def test_a_proposer_that_does_not_pay_costs_a_hundredth() -> None:
    steps, cost_tokens = 20_000, 0.25
    taken = run(TrialGate(), steps, gain=0.0, cost_tokens=cost_tokens)
    assert all(taken[: GATE.steps])
    assert not any(taken[GATE.steps : 2 * GATE.steps])
    assert sum(taken) >= 2 * GATE.steps  # it was tried again
    assert sum(taken) * cost_tokens <= TRIALS.loss * steps + GATE.steps * cost_tokens


def test_a_proposer_that_begins_to_pay_is_found_and_one_that_ceases_is_dropped() -> None:
    gate = TrialGate()
    run(gate, 2 * GATE.steps, gain=0.0, cost_tokens=0.1)
    assert all(run(gate, 2000, gain=0.5, cost_tokens=0.1)[-500:])
    later = run(gate, 2000, gain=0.0, cost_tokens=0.1)
    assert sum(later) < 500


def test_a_rising_cost_ends_a_proposer_at_once_and_a_falling_cost_restores_it() -> None:
    gate = TrialGate()
    run(gate, 2 * GATE.steps, gain=0.3, cost_tokens=0.1)
    assert not gate.takes(0.31, trial=True)
    assert gate.takes(0.29, trial=False)


def test_a_trial_that_costs_too_much_or_meets_another_trial_is_not_begun() -> None:
    assert not any(run(TrialGate(), 5 * GATE.steps, gain=9.0, cost_tokens=GATE.max_cost_tokens + 0.01))
    gate = TrialGate()
    assert not gate.takes(0.1, trial=False)
    assert gate.takes(0.1, trial=True)
