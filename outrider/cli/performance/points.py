"""The figures of loads: one point for each load, mode and repetition, in a file that later runs compare with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.cli.performance.load import LoadResult
from outrider.cli.performance.samples import acceptance_length, bytes_per_token, percentile, steps_by_depth
from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """The figures of one load with or without speculation; None where no answer ended in time."""

    callers: int
    repetition: int
    speculative: bool
    goodput: float  # tokens per second over all callers
    answers: int
    acceptance_length: float | None
    first_token_p50_s: float | None
    gap_p50_s: float | None
    gap_p99_s: float | None
    wire_bytes_per_token: float | None
    reached_by_depth: tuple[int, ...] = ()  # steps whose accepted path reached depth d, at index d - 1
    tried_by_depth: tuple[int, ...] = ()  # steps that verified a node at depth d, at index d - 1

    @classmethod
    def of(cls, callers: int, repetition: int, speculative: bool, result: LoadResult) -> LoadPoint:
        """Return the figures of a result."""
        samples = result.samples
        gaps = [gap for sample in samples for gap in sample.gaps]
        figures = (
            acceptance_length(samples),
            percentile((sample.first_token_s for sample in samples), 50),
            percentile(gaps, 50),
            percentile(gaps, 99),
            bytes_per_token(samples),
        )
        length, first, gap, long_gap, wire = (None if figure != figure else figure for figure in figures)  # NaN
        reached, tried = (tuple(map(int, steps)) for steps in steps_by_depth(samples))
        goodput, answers = result.goodput, len(samples)
        return cls(
            callers, repetition, speculative, goodput, answers, length, first, gap, long_gap, wire, reached, tried
        )


def write_points(file: Path, points: Sequence[LoadPoint]) -> None:
    """Write them as JSON."""
    file.write_text(json.dumps([asdict(point) for point in points], indent=1) + "\n", encoding="utf-8")


def read_points(file: Path) -> list[LoadPoint]:
    """Read what `write_points` wrote; earlier versions wrote no depths. Raises ConfigError."""
    try:
        entries: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
        points = [LoadPoint(**_with_tuples(entry)) for entry in entries]
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from None
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(f"{file}: holds no figures of `outrider bench --json`") from None
    if not points:
        raise ConfigError(f"{file}: holds no figures")
    return points


def _with_tuples(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
