"""Export of a server's metrics. Counters and gauges are read when an exporter asks; other values are recorded in
histograms.

The only cost per step is a histogram's record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Histogram, Observation

from outrider.telemetry.catalogue import BY_NAME

Reading = float | Mapping[str, float] | Mapping[tuple[str, ...], float]  # by the values of its labels, if it has any

_METER = metrics.get_meter("outrider")


def register_metric(name: str, read: Callable[[], Reading]) -> None:
    """Export a counter or gauge of the catalogue. `read` returns its value and is called in another thread."""
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
    """Return counts by depth, labelled as in vLLM: position 0 is the first below the root."""
    return {str(position): float(count) for position, count in enumerate(counts)}


def histogram(name: str) -> Histogram:
    """Return a histogram of the catalogue."""
    metric = BY_NAME[name]
    return _METER.create_histogram(
        name, metric.unit, metric.description, explicit_bucket_boundaries_advisory=metric.buckets
    )
