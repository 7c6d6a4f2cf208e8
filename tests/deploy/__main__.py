"""`make manifests`: writes every overlay as it is rendered, and reports what is wrong with it.

The alerts in the manifests are first made of deploy/prometheus/alerts.yaml, and bound to the namespace.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import yaml

from tests.deploy.manifests import DEPLOY, OVERLAYS, rendered
from tests.deploy.validation import problems

RULE = """\
# deploy/prometheus/alerts.yaml as the Prometheus operator takes it; `make manifests` makes this of that.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  labels: {release: kube-prometheus-stack} # by which its chart's Prometheus finds them
  name: outrider
spec:
"""
NAMESPACE = 'namespace="outrider"'  # of whatever else has the same names, a router above all, these alerts know nothing
_SERIES = re.compile(r"(?<![\w:])(up|(?:outrider|spec_decode|gen_ai_server|instance:outrider)[\w:]*)(?=[\[{\s)])(\{)?")
_QUERY = re.compile(r"^( +)expr: (?:\|\n(?:\1 .*\n)+|.*\n)", re.MULTILINE)


def rule() -> str:
    """The object of our alerts, which are bound to the namespace."""
    alerts = (DEPLOY / "prometheus" / "alerts.yaml").read_text(encoding="utf-8")
    return RULE + textwrap.indent(_QUERY.sub(lambda query: bound(query[0]), alerts), "  ")


def bound(query: str) -> str:
    """A query of Prometheus that asks only for series of the namespace."""
    return _SERIES.sub(lambda it: f"{it[1]}{{{NAMESPACE}" + ("," if it[2] else "}"), query)


def main(folder: Path) -> int:
    """Return the exit status: 1 when something is wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    wrong = []
    for overlay in OVERLAYS:
        manifests = rendered(overlay)
        (folder / f"{overlay}.yaml").write_text(yaml.safe_dump_all(manifests, sort_keys=False), encoding="utf-8")
        found = problems(manifests)
        wrong += found
        print(f"{overlay}: {len(manifests)} objects" + "".join(f"\n  {line}" for line in found))
    print(f"manifests: {len(wrong)} problems; they are in {folder}")
    return int(bool(wrong))


if __name__ == "__main__":
    (DEPLOY / "components" / "monitoring" / "rules.yaml").write_text(rule(), encoding="utf-8")
    sys.exit(main(Path(sys.argv[1])))
