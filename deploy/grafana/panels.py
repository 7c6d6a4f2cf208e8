"""How a dashboard is written as Grafana's JSON: rows of panels, each with its queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

MODEL = 'gen_ai_request_model=~"$model"'
QUANTILES = (0.5, 0.9, 0.99)

_INSTANCE = 'instance=~"$instance"'
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_CHOICES = {  # by variable: what it is called, and where its values are from
    "model": ("Model", "label_values(outrider_tokens_total, gen_ai_request_model)"),
    "instance": ("Server", 'label_values({__name__=~"outrider_.+"}, instance)'),
}
_SCHEMA = 39  # of Grafana 11
_WIDTH, _HEIGHT = 24, 8  # of the grid; of a panel
_ABREAST = 4


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL, and what its lines are called."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph over time. `unit`: Grafana's name of one; "suffix: x" is any other."""

    title: str
    description: str
    unit: str
    queries: Sequence[Query]
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """Panels beside each other, at most four to a line, and lines of one length."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One page; `uid` is its name in links."""

    uid: str
    title: str
    description: str
    rows: Sequence[Row]


def quantiles(histogram: str, *matchers: str) -> list[Query]:
    """Of a histogram, over all that the page has chosen."""
    inner = f"sum by (le) ({_rate(f'{histogram}_bucket', matchers)})"
    return [Query(f"histogram_quantile({share}, {inner})", f"p{share * 100:g}") for share in QUANTILES]


def quantile(histogram: str, share: float, *matchers: str) -> list[Query]:
    """Of a histogram, a line for each server."""
    return [Query(f"histogram_quantile({share}, {_rate(f'{histogram}_bucket', matchers)})", "{{job}} {{instance}}")]


def rates(counter: str, label: str, *matchers: str) -> list[Query]:
    """A line for each value of a label."""
    return [Query(f"sum by ({label}) ({_rate(counter, matchers)})", f"{{{{{label}}}}}")]


def total(counter: str, legend: str) -> Query:
    """One line, over all servers."""
    return Query(f"sum ({_rate(counter)})", legend)


def shares(part: str, whole: str, label: str) -> list[Query]:
    """One counter over another, a line for each value of a label."""
    return [Query(f"sum by ({label}) ({_rate(part)})\n/ sum by ({label}) ({_rate(whole)})", f"{{{{{label}}}}}")]


def levels(gauge: str) -> list[Query]:
    """A line for each server; also of what is recorded of a server."""
    return [Query(f"{gauge}{{{_INSTANCE}}}", "{{instance}}")]


def greatest(gauge: str, label: str) -> list[Query]:
    """Of what all servers see alike."""
    return [Query(f"max by ({label}) ({gauge}{{{_INSTANCE}}})", f"{{{{{label}}}}}")]


def sums(gauge: str, label: str) -> list[Query]:
    """Of what each server has its own of."""
    return [Query(f"sum by ({label}) ({gauge}{{{_INSTANCE}}})", f"{{{{{label}}}}}")]


def _rate(counter: str, matchers: Sequence[str] = ()) -> str:
    return f"rate({counter}{{{', '.join((*matchers, _INSTANCE))}}}[$__rate_interval])"


def drawn(dashboard: Dashboard) -> dict[str, Any]:
    """As Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in dashboard.rows:
        panels.append(_titled(len(panels) + 1, row.title, top))
        top += 1
        abreast = ceil(len(row.panels) / ceil(len(row.panels) / _ABREAST))
        width = _WIDTH // abreast
        for first in range(0, len(row.panels), abreast):
            line = row.panels[first : first + abreast]
            panels += [_graph(len(panels) + 1 + at, one, at * width, top, width) for at, one in enumerate(line)]
            top += _HEIGHT
    asked = "".join(query.expression for row in dashboard.rows for panel in row.panels for query in panel.queries)
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["outrider"],
        "schemaVersion": _SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one cursor for all graphs
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [{"type": "dashboards", "title": "Outrider", "tags": ["outrider"], "keepTime": True}],
        "templating": {
            "list": [
                {"type": "datasource", "name": "datasource", "label": "Prometheus", "query": "prometheus"},
                *(_choice(name, *choice) for name, choice in _CHOICES.items() if f"${name}" in asked),
            ]
        },
        "panels": panels,
    }


def _titled(identity: int, title: str, top: int) -> dict[str, Any]:
    return {
        "id": identity,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": {"x": 0, "y": top, "w": _WIDTH, "h": 1},
        "panels": [],
    }


def _graph(identity: int, panel: Panel, left: int, top: int, width: int) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 10, "showPoints": "never"}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal"}
    return {
        "id": identity,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": {"x": left, "y": top, "w": width, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": _SOURCE, "expr": one.expression, "legendFormat": one.legend}
            for at, one in enumerate(panel.queries)
        ],
    }


def _choice(name: str, label: str, query: str) -> dict[str, Any]:
    """A variable of several values; at first all."""
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # when the time range changes
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }
