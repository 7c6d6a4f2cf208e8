"""Metrics as servers tell them. What is counted anyway is read when somebody asks; the rest is recorded in histograms.

Nothing here costs a step anything but a histogram's record, once a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Histogram, Observation

from outrider.telemetry.catalogue import BY_NAME

Reading = float | Mapping[str, float] | Mapping[tuple[str, ...], float]  # by the values of its labels, where it has any

_METER = metrics.get_meter("outrider")


def watch(name: str, read: Callable[[], Reading]) -> None:
    """Tells a counter or a gauge of the catalogue by what `read` returns, which is called in another thread."""
    metric = BY_NAME[name]

    def observe(options: CallbackOptions) -> Iterable[Observation]:
        reading = read()
        if not isinstance(reading, Mapping):
            return [Observation(reading)]
        return [
            Observation(value, dict(zip(metric.labels, (at,) if isinstance(at, str) else at, strict=True)))
            for at, value in tuple(reading.items())
        ]

    create = _METER.create_observable_counter if metric.kind == "counter" else _METER.create_observable_gauge
    create(name, [observe], metric.unit, metric.description)


def by_position(counts: Sequence[int]) -> dict[str, float]:
    """Counts by depth, as vLLM labels them: position 0 is the first below the root."""
    return {str(position): float(count) for position, count in enumerate(counts)}


def histogram(name: str) -> Histogram:
    """A histogram of the catalogue."""
    metric = BY_NAME[name]
    return _METER.create_histogram(
        name, metric.unit, metric.description, explicit_bucket_boundaries_advisory=metric.buckets
    )
