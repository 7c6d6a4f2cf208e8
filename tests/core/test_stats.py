"""The moving averages."""

from __future__ import annotations

import pytest

from outrider.core.stats import Ema, FadingRatio


def test_the_first_value_is_the_mean_and_later_values_move_it_by_their_weight() -> None:
    average = Ema(0.25)
    assert (average.mean, average.count) == (0.0, 0)
    for value, mean in ((8.0, 8.0), (0.0, 6.0), (6.0, 6.0)):
        average.observe(value)
        assert average.mean == mean


def test_an_initial_mean_counts_as_an_earlier_observation() -> None:
    average = Ema(0.5, mean=4.0)
    average.observe(0.0)
    assert average.mean == 2.0


def test_values_count_equally_during_warm_up() -> None:
    average = Ema(0.2, warm_up=True)
    for value in (3.0, 6.0, 0.0, 7.0):
        average.observe(value)
    assert average.mean == pytest.approx(4.0)
    for _ in range(2):
        average.observe(9.0)
    assert average.mean == pytest.approx(5.0 + 0.2 * 4.0)


def test_earlier_hits_and_attempts_fade_alike() -> None:
    ratio = FadingRatio(0.5)
    assert ratio.ratio == 0.0
    ratio.observe(1.0)
    ratio.observe(0.0, 2.0)
    assert (ratio.hits, ratio.attempts, ratio.ratio) == (0.5, 2.5, 0.2)


def test_an_assumed_ratio_fades_like_observations() -> None:
    ratio = FadingRatio(0.9, hits=4.0, attempts=8.0)
    assert ratio.ratio == 0.5
    for _ in range(200):
        ratio.observe(1.0)
    assert ratio.ratio == pytest.approx(1.0, abs=1e-6)
