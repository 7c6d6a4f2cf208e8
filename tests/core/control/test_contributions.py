"""A drafter that adds nothing to the others is found out; one that adds something is kept."""

import numpy as np
import pytest

from outrider.core.control.drafters.contributions import CONTRIBUTION, ContributionTracker, DrafterContribution


def detached(tracker: ContributionTracker, rates: dict[str, float], steps: int, seed: int = 0) -> list[str]:
    """The drafters to detach, in order, if each alone had its rate of accepted tokens a step."""
    generator = np.random.default_rng(seed)
    gone = []
    for _ in range(steps):
        contributions = tuple(
            DrafterContribution(name, 9, 3, int(generator.poisson(rate))) for name, rate in rates.items()
        )
        if (drafter := tracker.observe(contributions)) is not None:
            gone.append(drafter)
    return gone


@pytest.mark.parametrize("seed", range(5))
def test_a_drafter_that_never_helps_is_detached_after_its_trial(seed: int) -> None:
    assert detached(ContributionTracker(), {"a": 0.5, "b": 0.0}, CONTRIBUTION.steps - 1, seed) == []
    assert set(detached(ContributionTracker(), {"a": 0.5, "b": 0.0}, 3 * CONTRIBUTION.steps, seed)) == {"b"}
    assert detached(ContributionTracker(), {"a": 0.5, "b": 0.4}, 20 * CONTRIBUTION.steps, seed) == []


def test_one_of_two_drafters_with_equal_proposals_stays() -> None:
    tracker = ContributionTracker()
    (gone, *_) = detached(tracker, {"a": 0.0, "b": 0.0}, CONTRIBUTION.steps)
    assert gone in ("a", "b")
    other = {"a": "b", "b": "a"}[gone]
    assert detached(tracker, {other: 1.5}, 10 * CONTRIBUTION.steps) == []  # what was both's is its own now


def test_a_late_drafter_is_judged_from_its_own_first_step() -> None:
    tracker = ContributionTracker()
    detached(tracker, {"a": 0.5, "b": 0.4}, 10 * CONTRIBUTION.steps)
    assert detached(tracker, {"a": 0.5, "b": 0.4, "c": 0.0}, CONTRIBUTION.steps - 1) == []
    assert detached(tracker, {"a": 0.5, "b": 0.4, "c": 0.0}, 1) == ["c"]
    assert 0 < CONTRIBUTION.min_alone < 0.1
