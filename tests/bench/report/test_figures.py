"""The figures that a run is judged by."""

from __future__ import annotations

import math
import re

import pytest

from bench.engine.roofline import Limit
from bench.report.figures import BenchResults, Measurement, StepProfile, last_line, of_first_link, over_best, ratio
from bench.rows.requests import BenchRequest, sample_from_json, sample_to_json
from outrider.cli.performance.samples import (
    Sample,
    acceptance_by_depth,
    acceptance_length,
    bytes_per_token,
    paired_ratio,
    percentile,
    spread,
)

LIMIT = Limit(2, read_gb_s=30.0, bfloat16_gflops=200.0, float32_gflops=100.0, ways={"sum": 30.0, "linear": 20.0})


def steady(rate: float, tokens: int = 11, steps: int = 11, first: float = 0.5, wire: int = 0) -> Sample:
    """One token at a time, `rate` a second after the first."""
    return Sample(tuple(range(tokens)), tuple(first + index / rate for index in range(tokens)), steps, wire)


def take(
    row: str, rate: float, prompt: str = "a", repetition: int = 0, heat: float = 0.0, target: int = 150
) -> Measurement:
    return Measurement(target, row, prompt, repetition, heat, steady(rate))


def test_simultaneous_tokens_are_one_arrival() -> None:
    sample = Sample((1, 2, 3, 4, 5, 6), (0.5, 0.5, 0.7, 0.7, 0.7, 1.5), steps=3)
    assert sample.gaps == pytest.approx([0.2, 0.8])
    assert sample.first_token_s == 0.5


def test_speed_counts_only_tokens_behind_the_first_arrival() -> None:
    assert Sample((1, 2, 3, 4, 5, 6), (0.5, 0.5, 0.7, 0.7, 0.7, 1.5), steps=3).tokens_per_s == pytest.approx(4.0)
    assert steady(20.0).tokens_per_s == pytest.approx(20.0)
    assert Sample((1, 2), (0.5, 0.5), steps=1).tokens_per_s == 0.0  # one arrival has no speed
    assert Sample((), (), steps=0).tokens_per_s == 0.0


def test_a_ratio_is_the_median_over_pairs_and_ignores_unpaired_samples() -> None:
    over = {"a": 10.0, "b": 90.0, "c": 30.0, "alone": 1e9}
    assert paired_ratio(over, {"a": 5.0, "b": 3.0, "c": 10.0, "other": 1.0, "zero": 0.0}) == 3.0
    assert paired_ratio({"a": 1.0}, {"b": 1.0}) is None
    assert paired_ratio({"a": 1.0}, {"a": 0.0}) is None


def test_medians_and_spread_interpolate() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0
    assert math.isnan(percentile([], 99))


def test_lengths_bytes_and_depths_pool_all_samples() -> None:
    samples = [
        Sample((1,) * 8, (0.0,) * 8, steps=2, wire_bytes=800, reached_by_depth=(2, 1), tried_by_depth=(2, 2)),
        Sample((1,) * 2, (0.0,) * 2, steps=2, wire_bytes=100, reached_by_depth=(0,), tried_by_depth=(2,)),
    ]
    assert acceptance_length(samples) == 2.5
    assert bytes_per_token(samples) == 90.0
    assert acceptance_by_depth(samples) == [0.5, 0.5]
    assert math.isnan(acceptance_length([]))


def test_asks_and_samples_survive_the_pipe() -> None:
    ask = BenchRequest((1, 2, 3), 0.6, 2**63, 5)
    assert BenchRequest.from_json(ask.to_json()) == ask
    sample = Sample((1, 2), (0.25, 0.5), 2, 7, (1,), (2,))
    assert sample_from_json(sample_to_json(sample)) == sample


def test_takes_are_paired_by_target_prompt_repetition_and_temperature() -> None:
    takes = [
        take("distributed", 40.0),
        take("plain", 20.0),
        take("distributed", 90.0, repetition=1),
        take("plain", 30.0, repetition=1),
        take("plain", 1.0, repetition=2),
        take("distributed", 50.0, heat=1.0),
        take("distributed", 50.0, target=400),
    ]
    assert ratio(takes, "distributed", "plain") == pytest.approx(2.5)
    assert ratio(takes, "distributed", "assisted") is None


def test_a_distance_is_judged_by_the_first_link() -> None:
    near = Measurement(150, "measured", "a", 0, 0.0, steady(50.0), "0 ms")
    far = Measurement(150, "measured", "a", 0, 0.0, steady(20.0), "50 ms")
    assert of_first_link([near, far], "50 ms") == pytest.approx(0.4)
    assert of_first_link([near, far], "0 ms") == pytest.approx(1.0)
    assert of_first_link([near, far], "200 ms") is None


def test_the_floor_is_reading_for_few_rows_and_multiplying_for_many() -> None:
    assert LIMIT.floor_s(300_000_000, 1, "bfloat16") == pytest.approx(0.01)
    assert LIMIT.floor_s(300_000_000, 100, "bfloat16") == pytest.approx(0.15)  # 2 x 100 x 150M over 200 GFLOPS
    assert LIMIT.floor_s(300_000_000, 100, "float32") == pytest.approx(0.15)  # 2 x 100 x 75M over 100 GFLOPS


def test_the_better_limit_takes_the_best_of_each() -> None:
    other = Limit(2, 25.0, 300.0, 50.0, {"sum": 10.0, "linear": 25.0})
    assert LIMIT.better(other) == Limit(2, 30.0, 300.0, 100.0, {"sum": 30.0, "linear": 25.0})


def test_the_last_line_is_of_the_largest_target() -> None:
    results = BenchResults(
        takes=[
            *(take("plain", 20.0, heat=heat, target=400) for heat in (0.0, 1.0)),
            take("distributed", 60.0, target=400),
            take("distributed", 50.0, heat=1.0, target=400),
            *(take("assisted", 10.0, heat=heat, target=400) for heat in (0.0, 1.0)),
            *(take("transformers", 10.0, heat=heat, target=400) for heat in (0.0, 1.0)),
            take("in-process", 50.0, target=400),
            take("llama.cpp", 30.0, target=400),
            take("llama.cpp-draft-6", 40.0, target=400),
            take("llama.cpp", 25.0, heat=1.0, target=400),
            take("llama.cpp-draft-6", 10.0, heat=1.0, target=400),
            take("plain", 1.0),
            take("distributed", 100.0),
        ],
        profiles=[
            StepProfile(400, "plain", 1, 25.0, 3.0, 1.0, math.nan, 20.0, 13.0),
            StepProfile(400, "distributed", 9, 30.0, 0.0, 0.75, 29.0, 20.0),
            StepProfile(150, "plain", 1, 1.0, 0.0, 0.0, 1.0, 1.0),
        ],
    )
    assert last_line(results) == (
        "bench: spec_over_plain_t0=3.00 spec_over_plain_t1=2.50 over_assisted=5.50 plain_over_transformers=2.00 "
        "distributed_over_in_process=1.20 overhead_ms=0.75 bytes_per_token=0 fraction_of_floor=1.30 "
        "step_over_floor=2.00 over_llama_cpp_t0=1.50 over_llama_cpp_t1=2.00"
    )


def test_the_ratio_is_taken_over_the_fastest_measured_row() -> None:
    takes = [take("ours", 60.0), take("slow", 10.0), take("fast", 40.0), take("other", 90.0)]
    assert over_best(takes, "ours", ("slow", "fast", "missing")) == pytest.approx(1.5)
    assert over_best(takes, "ours", ("missing",)) is None


def test_a_figure_without_measurement_is_printed_as_a_dash() -> None:
    assert re.fullmatch(r"bench:( \w+=-){11}", last_line(BenchResults()))
