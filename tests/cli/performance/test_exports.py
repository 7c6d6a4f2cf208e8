"""Figures in other benchmarks' forms say what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.cli.performance.aiperf import FILE, write_export
from outrider.cli.performance.load import LoadResult
from outrider.cli.performance.plots import check_plot, draw
from outrider.cli.performance.points import LoadPoint
from outrider.cli.performance.samples import Sample
from outrider.cli.performance.spec_bench import accept_lengths
from outrider.client import FinishReason, Generation, Usage
from outrider.errors import ConfigError


def answer(tokens: int, steps: int, reached: tuple[int, ...]) -> Generation:
    usage = Usage(4, tokens, steps, 0, 0, reached, reached, 0, 0.1, 1.0, 0.9)
    return Generation("text", tuple(range(tokens)), (), FinishReason.STOP, 0, "target", "s1", usage)


def test_aiperf_s_export_has_its_units_and_distributions(tmp_path: Path) -> None:
    samples = [
        Sample((1, 2, 3), (0.1, 0.2, 0.2), 2),
        Sample((1, 2, 3), (0.3, 0.5, 0.9), 3),
        Sample((), (), 0),  # ended before its first token
    ]
    file = write_export(tmp_path / "run", LoadResult(2.0, 10, samples), {"concurrency": 2})
    assert file.name == FILE
    found = json.loads(file.read_text())
    assert found["request_count"] == {"unit": "requests", "avg": 2.0}
    assert found["request_throughput"] == {"unit": "requests/sec", "avg": 1.0}
    assert found["output_token_throughput"] == {"unit": "tokens/sec", "avg": 5.0}
    first = found["time_to_first_token"]
    assert (first["unit"], first["count"], first["min"], first["max"]) == ("ms", 2, 100.0, 300.0)
    assert first["sum"] == pytest.approx(400.0)
    assert first["p50"] == first["avg"] == pytest.approx(200.0)
    between = found["inter_token_latency"]
    assert (between["min"], between["max"]) == (pytest.approx(50.0), pytest.approx(300.0))
    assert found["request_latency"]["max"] == pytest.approx(900.0)
    assert found["output_sequence_length"]["avg"] == 3.0
    assert found["input_config"] == {"concurrency": 2}


def test_a_load_without_an_answer_has_no_distributions(tmp_path: Path) -> None:
    found = json.loads(write_export(tmp_path, LoadResult(1.0), {}).read_text())
    assert "time_to_first_token" not in found
    assert found["request_count"]["avg"] == 0.0


@pytest.mark.parametrize(
    ("tokens", "steps", "reached", "lengths"),
    [
        (3, 3, (), [1, 1, 1]),
        (7, 3, (2, 1, 1), [1, 2, 4]),
        (0, 0, (), []),
    ],
)
def test_the_lengths_of_steps_follow_from_their_reached_depths(
    tokens: int, steps: int, reached: tuple[int, ...], lengths: list[int]
) -> None:
    found = sorted(accept_lengths(answer(tokens, steps, reached)))
    assert found == lengths
    assert sum(found) == tokens


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    points = [
        LoadPoint(callers, 0, speculative, 100.0 * callers, 3, 2.0, 0.1, 0.01, 0.02, 40.0, (3, 1), (4, 2))
        for callers in (1, 4)
        for speculative in (False, True)
    ]
    file = tmp_path / "plot.svg"
    check_plot(file)
    draw(file, points)
    assert file.read_text(encoding="utf-8").count("<path") > 10


def test_a_plot_has_a_kind_that_can_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--plot: .* must end in \.png"):
        check_plot(tmp_path / "plot.txt")
