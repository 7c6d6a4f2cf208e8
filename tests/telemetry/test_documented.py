"""docs/observability.md names what there is, all of it, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from outrider.telemetry.catalogue import METRICS, Metric

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
SOURCES = [
    "outrider/client/_stream.py",
    "outrider/rpc/tracing.py",
    "outrider/core/control/arms/steering.py",
    "outrider/upstream/foreign_session.py",
    "router/counters/request_metrics.py",
    "verifier_svc/tracing.py",
    "drafter_svc/tracing.py",
]
ATTRIBUTE = r"(?:gen_ai|outrider|rpc|error)(?:\.[a-z_]+)+"


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def row(metric: Metric) -> str:
    """As the table of metrics has it."""
    labels = ", ".join(f"`{label.replace('.', '_')}`" for label in metric.labels)
    cells = (f"`{metric.exposed}`", metric.kind, labels, metric.role, metric.description)
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def test_the_table_of_metrics_is_the_catalogue() -> None:
    assert re.findall(r"^\| `.+$", section("Metrics"), re.MULTILINE) == [row(metric) for metric in METRICS]


def test_the_documented_span_attributes_equal_those_of_the_code() -> None:
    code = "\n".join((ROOT / path).read_text(encoding="utf-8") for path in SOURCES)
    in_code = set(re.findall(rf'(?:set_attribute\("|[ {{]")({ATTRIBUTE})"[:,] ', code))
    assert set(re.findall(rf"`({ATTRIBUTE})`", section("A trace"))) == in_code - {"gen_ai.token.type"}  # a metric's
