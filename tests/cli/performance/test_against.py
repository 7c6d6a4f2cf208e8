"""Two runs are compared by ratios whose intervals hold the truth as often as they claim."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from outrider.cli.performance.against import T_95, T_95_MORE, compared, comparison_table
from outrider.cli.performance.points import LoadPoint, read_points, write_points
from outrider.errors import ConfigError


def point(goodput: float, repetition: int = 0, *, callers: int = 1, speculative: bool = True) -> LoadPoint:
    return LoadPoint(callers, repetition, speculative, goodput, 3, 2.0, 0.1, 0.01, 0.02, 40.0, (3, 1), (4, 2))


def test_the_quantiles_are_student_s() -> None:
    assert np.allclose(T_95, [stats.t.ppf(0.975, freedom) for freedom in range(1, 16)], atol=5e-4)
    assert stats.t.ppf(0.975, 16) < T_95_MORE


def test_the_comparison_is_welch_s_test_on_logarithms() -> None:
    now, before = [110.0, 121.0, 118.0, 109.0], [100.0, 97.0, 104.0]
    found = compared(now, before)
    ours = stats.ttest_ind(np.log(now), np.log(before), equal_var=False)
    low, high = ours.confidence_interval(0.95)
    assert math.isclose(found.ratio, math.exp(np.log(now).mean() - np.log(before).mean()))
    assert (
        found.low <= math.exp(low) < found.ratio < math.exp(high) <= found.high
    )  # degrees of freedom are rounded down
    assert found.verdict == "faster"


def test_intervals_of_noise_cover_the_true_ratio_at_their_stated_rate() -> None:
    dice = np.random.default_rng(7)
    runs = 2000
    held = sum(
        (found := compared(1.1 * np.exp(dice.normal(0, 0.1, 3)), np.exp(dice.normal(0, 0.1, 3)))).low
        <= 1.1
        <= found.high
        for _ in range(runs)
    )
    assert held / runs > 0.95 - 3 * math.sqrt(0.05 * 0.95 / runs)


@pytest.mark.parametrize(
    ("now", "before", "verdict"),
    [
        ([100, 101, 99], [100, 102, 98], "no difference shown"),
        ([80, 81, 82], [100, 101, 102], "slower"),
        ([120], [100, 101], "too few repetitions"),
        ([120, 120], [100, 100], "faster"),
    ],
)
def test_a_verdict_follows_from_the_interval(now: list[float], before: list[float], verdict: str) -> None:
    assert compared(now, before).verdict == verdict


def test_only_points_that_both_runs_have_are_compared() -> None:
    now = [point(110, 0), point(112, 1), point(100, callers=4)]
    before = [point(100, 0), point(101, 1), point(90, speculative=False)]
    assert comparison_table(now, before).row_count == 1


def test_written_figures_are_read_back_unchanged(tmp_path: Path) -> None:
    points = [point(100), point(90, speculative=False)]
    write_points(tmp_path / "figures.json", points)
    assert read_points(tmp_path / "figures.json") == points


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", "[1]", '[{"callers": 1}]', '{"a": 1}', "[{}]"])
def test_a_file_that_holds_no_figures_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "figures.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"figures\.json: holds no figures"):
        read_points(file)
