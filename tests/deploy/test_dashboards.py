"""Dashboards and alerts query only series that exist, and every alert states what to do."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deploy.grafana.make import FOLDER, made
from tests.deploy.promql import Checker, Series
from tests.deploy.shipped import DASHBOARDS, ROOT, RULES, Asked, checker, dashboard, queries, rules

ALERTS = (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")


def test_making_the_dashboards_again_changes_nothing() -> None:
    assert {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()} == made()


@pytest.mark.parametrize("asked", queries(), ids=lambda asked: f"{asked.panel}: {asked.legend}")
def test_a_panel_queries_existing_metrics_and_labels(asked: Asked) -> None:
    labels = checker().labels(asked.query)
    named = set(re.findall(r"{{(\w+)}}", asked.legend))
    assert named <= labels
    assert labels - named <= {"job"}, "lines that have one name"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_can_be_imported_anywhere(path: Path) -> None:
    page = dashboard(path)
    variables = {one["name"]: one for one in page["templating"]["list"]}
    assert page["schemaVersion"] >= 39  # Grafana 11
    assert variables["datasource"]["type"] == "datasource"
    panels = page["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        if panel["type"] != "row":
            assert panel["description"].endswith(".")
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    used = set(re.findall(r"\$(?!__)\{?(\w+)", path.read_text(encoding="utf-8")))
    assert used == variables.keys()
    for variable in variables.values():
        if variable["type"] == "query":
            selector, _, label = variable["query"]["query"].removeprefix("label_values(").rstrip(")").partition(", ")
            name = selector.removeprefix('{__name__=~"').removesuffix('"}')
            asked = [one for known, one in checker().series.items() if re.fullmatch(name, known)]
            assert asked
            assert all(label in one.labels for one in asked)


@pytest.mark.parametrize("rule", rules("alert"), ids=lambda rule: rule["alert"])
def test_an_alert_queries_and_shows_only_existing_labels(rule: dict[str, Any]) -> None:
    labels = checker().labels(rule["expr"])
    assert set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))) <= labels
    assert rule["labels"] in ({"severity": "critical"}, {"severity": "warning"}, {"severity": "info"})
    assert rule["annotations"].keys() == {"summary", "description", "runbook"}


def test_every_alert_is_documented_and_every_entry_is_an_alert() -> None:
    entries = dict(re.findall(r"^## (\w+)\n\n(.+?)(?=\n\n|\Z)", ALERTS, re.MULTILINE | re.DOTALL))
    alerts = {rule["alert"]: rule for rule in rules("alert")}
    assert list(entries) == list(alerts)
    for name, rule in alerts.items():
        assert rule["annotations"]["runbook"] == f"docs/alerts.md#{name.lower()}"
        assert len(entries[name].splitlines()) >= 3


def test_every_recording_rule_is_used() -> None:
    used = checker()
    for query in [*(asked.query for asked in queries()), *(rule["expr"] for rule in rules("alert"))]:
        used.labels(query)
    assert {rule["record"] for rule in rules("record")} <= used.asked


@pytest.mark.parametrize(
    "nonsense",
    [
        "rate(outrider_gone_total[5m])",
        "rate(outrider_gamma[5m])",
        "min_over_time(outrider_moves_total[5m])",
        "sum by (drafter) (outrider_gamma)",
        'outrider_workers{rolle="verifier"}',
        'outrider_workers{role="verifyer"}',
        "histogram_quantile(0.5, rate(outrider_queue_wait_seconds_sum[5m]))",
        "rate(outrider_moves_total[5m]) / rate(outrider_requests_total[5m])",
        "rate(outrider_moves_total)",
    ],
)
def test_the_query_check_notices_nonsense(nonsense: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        checker().labels(nonsense)


def test_the_check_follows_labels_through_a_query() -> None:  # bites: of the check itself
    checks = Checker({"a_bucket": Series(counts=True, labels=frozenset({"job", "le", "x"}))}, {})
    assert checks.labels("histogram_quantile(0.5, sum without (job) (rate(a_bucket[5m]))) > 1") == {"x"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool comes with Prometheus")
def test_alerts_fire_in_time_and_not_before() -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", ROOT / "tests" / "deploy" / "alerts.yaml"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_tried() -> None:
    tried = (ROOT / "tests" / "deploy" / "alerts.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r"alertname=\"(\w+)\"", tried)) == {rule["alert"] for rule in rules("alert")}
    assert RULES.name in tried
