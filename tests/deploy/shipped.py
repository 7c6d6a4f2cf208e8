"""The dashboards and the rules as they are shipped, and the series that the code exposes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from outrider import errors
from outrider.core.session.contract import FinishReason
from outrider.core.session.speculation_status import SpeculationReason
from outrider.limits.fair_queue import QueueClass
from outrider.store.registry import Role
from outrider.telemetry.catalogue import METRICS
from tests.deploy.promql import SCRAPED, Checker, Series

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "alerts.yaml"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))

_PARTS = {"_bucket": frozenset({"le"}), "_sum": frozenset(), "_count": frozenset()}  # of a histogram
_VALUES = {
    "outcome": {"", *(reason.value for reason in FinishReason)}
    | {name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, errors.OutriderError)},
    "role": set(get_args(Role)),
    "reason": {reason.value for reason in SpeculationReason},
    "priority": {priority.name.lower() for priority in QueueClass},
}


class Asked(NamedTuple):
    """A query of a dashboard, and what its lines are called."""

    panel: str
    query: str
    legend: str


def dashboard(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def queries() -> list[Asked]:
    """The queries of all dashboards."""
    return [
        Asked(f"{path.stem}: {panel['title']}", target["expr"], target["legendFormat"])
        for path in DASHBOARDS
        for panel in dashboard(path)["panels"]
        for target in panel.get("targets", ())
    ]


def rules(kind: str) -> list[dict[str, Any]]:
    """`kind`: "alert" or "record"."""
    loaded = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return [rule for group in loaded["groups"] for rule in group["rules"] if kind in rule]


def checker() -> Checker:
    """Knows what servers expose and what is recorded."""
    series = dict(_SERIES)
    checks = Checker(series, {label: frozenset(values) for label, values in _VALUES.items()})
    for rule in rules("record"):
        series[rule["record"]] = Series(counts=False, labels=checks.labels(rule["expr"]))
    return checks


def _by_the_servers() -> dict[str, Series]:
    exposed = {}
    for metric in METRICS:
        labels = SCRAPED | {label.replace(".", "_") for label in metric.labels}
        parts = _PARTS if metric.kind == "histogram" else {"": frozenset()}
        for part, own in parts.items():
            exposed[metric.exposed + part] = Series(metric.kind != "gauge", labels | own)
    return exposed


def families(page: str) -> list[Family]:
    """The metric families of a page for Prometheus."""
    return list(text_string_to_metric_families(page))


_SERIES = {"up": Series(counts=False, labels=SCRAPED), **_by_the_servers()}
