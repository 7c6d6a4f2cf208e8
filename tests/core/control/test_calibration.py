"""Drafters' scores are corrected by what became of their nodes."""

import math

import numpy as np
import pytest

from outrider.core.control.cost.calibration import CALIBRATION, Calibration
from outrider.core.stats import LONG

SEEN = 1 / (1 - LONG)  # observations that count, of one class that was seen for long
SQUARES = 1 / (1 - LONG**2)  # the sum of their weights' squares


def expected(claim: float, chance: float) -> float:
    """The correction where nodes are right with this chance, in the mean."""
    return claim + math.log((SEEN * chance + CALIBRATION.prior) / (SEEN * math.exp(claim) + CALIBRATION.prior))


def deviation(chance: float) -> float:
    """Of the correction, in nats, to first order: hits are a weighted sum of draws."""
    return math.sqrt(SQUARES * chance * (1 - chance)) / (SEEN * chance + CALIBRATION.prior)


def test_an_unobserved_drafter_is_not_corrected() -> None:
    assert [Calibration().corrected(claim) for claim in (0.0, -0.5, -7.0)] == [0.0, -0.5, -7.0]


def test_a_calibrated_drafter_is_not_corrected() -> None:
    random = np.random.default_rng(1)
    calibration = Calibration()
    for claim in random.choice([-0.05, -0.7, -2.5], 3000):
        calibration.observe(claim, bool(random.random() < math.exp(claim)))
    for claim in (-0.05, -0.7, -2.5):
        assert calibration.corrected(claim) == pytest.approx(claim, abs=3 * deviation(math.exp(claim)))


def test_an_overconfident_drafter_is_corrected_to_its_acceptance_rate() -> None:
    random = np.random.default_rng(2)
    calibration = Calibration()
    for _ in range(2000):
        calibration.observe(-1 / 16, bool(random.random() < 0.1))
    assert expected(-1 / 16, 0.1) == pytest.approx(math.log(0.135), abs=0.01)  # the prior's trust is a third of it
    assert calibration.corrected(-1 / 16) == pytest.approx(expected(-1 / 16, 0.1), abs=3 * deviation(0.1))
    assert calibration.corrected(-3.0) == -3.0  # another class of claims


def test_a_modest_drafter_is_raised_and_never_above_certainty() -> None:
    calibration = Calibration()
    for _ in range(500):
        calibration.observe(-2.5, True)
    assert -2.5 < calibration.corrected(-2.5) <= 0.0


def test_a_score_that_never_comes_true_keeps_a_minimum_factor() -> None:
    calibration = Calibration()
    for _ in range(5000):
        calibration.observe(-0.05, False)
    assert calibration.corrected(-0.05) >= -0.05 + math.log(CALIBRATION.prior / (CALIBRATION.prior + SEEN))
