"""Drafters' scores are corrected by what became of their nodes."""

import math

import numpy as np
import pytest

from outrider.core.calibration import LEAST, Calibration


def test_nothing_is_corrected_before_anything_is_known() -> None:
    assert [Calibration().corrected(claim) for claim in (0.0, -0.5, -7.0)] == [0.0, -0.5, -7.0]


def test_an_honest_drafter_is_believed() -> None:
    random = np.random.default_rng(1)
    calibration = Calibration()
    for claim in random.choice([-0.05, -0.7, -2.5], 3000):
        calibration.observe(claim, bool(random.random() < math.exp(claim)))
    for claim in (-0.05, -0.7, -2.5):
        assert calibration.corrected(claim) == pytest.approx(claim, abs=0.25)


def test_a_boastful_drafter_comes_to_count_for_what_it_brings() -> None:
    random = np.random.default_rng(2)
    calibration = Calibration()
    for _ in range(2000):
        calibration.observe(-1 / 16, bool(random.random() < 0.1))
    assert math.exp(calibration.corrected(-1 / 16)) == pytest.approx(0.1, abs=0.06)
    assert calibration.corrected(-3.0) == -3.0  # another class of claims


def test_a_modest_drafter_is_raised_and_never_above_certainty() -> None:
    calibration = Calibration()
    for _ in range(500):
        calibration.observe(-2.5, True)
    assert -2.5 < calibration.corrected(-2.5) <= 0.0


def test_what_never_comes_true_keeps_a_little_of_its_score() -> None:
    calibration = Calibration()
    for _ in range(5000):
        calibration.observe(-0.05, False)
    assert calibration.corrected(-0.05) >= -0.05 + math.log(LEAST)
