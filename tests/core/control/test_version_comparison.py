"""Versions are compared temperature by temperature, and what little was seen proves nothing."""

import numpy as np
import pytest

from outrider.core.control.drafters.version_comparison import VERSIONS, AgreementCounts, worse


def seen(**counts: tuple[int, int]) -> AgreementCounts:
    found = AgreementCounts()
    for bucket, (agreed, compared) in counts.items():
        found.add(bucket, agreed, compared)
    return found


def test_a_version_that_agrees_much_less_is_worse() -> None:
    assert "30.0 points" in worse(seen(hot=(300, 1000)), seen(hot=(600, 1000)))
    assert worse(seen(hot=(600, 1000)), seen(hot=(300, 1000))) == ""


def test_a_difference_within_its_error_or_below_the_minimum_is_ignored() -> None:
    assert worse(seen(hot=(570, 1000)), seen(hot=(600, 1000))) == ""
    assert worse(seen(hot=(3960, 4096)), seen(hot=(4020, 4096))) == ""


@pytest.mark.parametrize("few", [0, VERSIONS.min_positions - 1])
def test_few_positions_prove_nothing(few: int) -> None:
    assert worse(seen(hot=(0, few)), seen(hot=(1000, 1000))) == ""
    assert worse(seen(hot=(0, 1000)), seen(hot=(few, few))) == ""


def test_a_shift_to_higher_temperatures_makes_no_version_worse() -> None:
    before = seen(greedy=(1800, 2000), hot=(300, 600))
    assert worse(seen(greedy=(540, 600), hot=(1000, 2000)), before) == ""
    assert worse(seen(hot=(1000, 2000)), seen(greedy=(1800, 2000))) == ""  # nothing to compare it with


def test_old_comparisons_fade() -> None:
    found = seen(hot=(4000, 4000))
    for _ in range(10):
        found.add("hot", 0, 4000)
    assert found.compared < VERSIONS.window * 1.6
    assert found.share < 0.05


def test_equal_versions_are_seldom_taken_for_worse() -> None:
    draw = np.random.default_rng(0)
    wrong = sum(
        bool(worse(seen(hot=(draw.binomial(1024, 0.6), 1024)), seen(hot=(draw.binomial(1024, 0.6), 1024))))
        for _ in range(2000)
    )
    assert wrong < 20
