"""The p-values of the test of drawn tokens are right, and it finds differences of the size that it reports."""

import numpy as np
import pytest
from scipy.stats import kstest

from outrider.cli.verification.distribution_check import LEVEL, detectable_difference, p_value


@pytest.mark.parametrize("count", [10, 100, 500, 20_000])
def test_p_values_are_scipy_s(count: int) -> None:
    for seed in range(20):
        places = np.random.default_rng(seed).random(count)
        assert p_value(places) == pytest.approx(kstest(places, "uniform").pvalue, abs=0.03)


def test_rare_p_values_are_right_within_a_few_hundredths_of_their_logarithm() -> None:
    places = np.random.default_rng(0).random(500) ** 1.4
    assert np.log(p_value(places)) == pytest.approx(np.log(kstest(places, "uniform").pvalue), rel=0.05)


@pytest.mark.parametrize("count", [256, 4096])
def test_a_detectable_difference_meets_the_significance_level(count: int) -> None:
    off = (np.arange(count) + 0.5) / count
    off = np.clip(off + detectable_difference(count) * 1.01, 0.0, 1.0)
    assert p_value(off) < LEVEL
    assert detectable_difference(count) < 2.3 / count**0.5


def test_an_empty_sample_is_no_evidence() -> None:
    assert p_value(np.empty(0)) == 1.0
