"""Writes figures of a load as AIPerf does, in `profile_export_aiperf.json`: its users can read and compare them.

The form is that of schema 1.1: https://docs.nvidia.com/aiperf/reference/json-export-schema
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from outrider.cli.performance.load import LoadResult
from outrider.cli.performance.samples import percentile

SCHEMA = "1.1"
FILE = "profile_export_aiperf.json"
PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)

Metric = dict[str, float | int | str]


def write_export(folder: Path, result: LoadResult, config: Mapping[str, Any]) -> Path:
    """Write the export into a folder, which is made. `config`: what was run. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / FILE
    file.write_text(json.dumps(export(result, config), indent=2) + "\n", encoding="utf-8")
    return file


def export(result: LoadResult, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the export of a load: its complete answers, and its tokens a second.

    An answer's inter-token latency is the time from its first token to its last one over the tokens after the first, as
    AIPerf has it.
    """
    samples = [sample for sample in result.samples if sample.arrivals]
    later = [sample for sample in samples if len(sample.tokens) > 1]
    latencies = [(sample.arrivals[-1] - sample.arrivals[0]) / (len(sample.tokens) - 1) for sample in later]
    metrics = {
        "request_throughput": _scalar("requests/sec", len(samples) / result.seconds),
        "request_count": _scalar("requests", len(samples)),
        "request_latency": _distribution("ms", (1e3 * sample.arrivals[-1] for sample in samples)),
        "time_to_first_token": _distribution("ms", (1e3 * sample.first_token_s for sample in samples)),
        "inter_token_latency": _distribution("ms", (1e3 * latency for latency in latencies)),
        "inter_chunk_latency": _distribution("ms", (1e3 * gap for sample in samples for gap in sample.gaps)),
        "output_token_throughput": _scalar("tokens/sec", result.goodput),
        "output_token_throughput_per_user": _distribution("tokens/sec/user", (1 / it for it in latencies if it > 0)),
        "output_sequence_length": _distribution("tokens", (len(sample.tokens) for sample in samples)),
        "benchmark_duration": _scalar("sec", result.seconds),
    }
    return {
        "schema_version": SCHEMA,
        **{name: metric for name, metric in metrics.items() if "avg" in metric},
        "was_cancelled": False,
        "input_config": dict(config),
    }


def _scalar(unit: str, value: float) -> Metric:
    return {"unit": unit, "avg": float(value)}


def _distribution(unit: str, values: Iterable[float]) -> Metric:
    known = np.array(list(values), np.float64)
    if not known.size:
        return {"unit": unit}
    return {
        "unit": unit,
        "avg": float(known.mean()),
        "min": float(known.min()),
        "max": float(known.max()),
        **{f"p{percent}": percentile(known, percent) for percent in PERCENTILES},
        "std": float(known.std(ddof=1)) if known.size > 1 else 0.0,
        "count": int(known.size),
        "sum": float(known.sum()),
    }
