"""Writes the dashboards: python -m deploy.grafana.make"""

from __future__ import annotations

import json
from pathlib import Path

from deploy.grafana.overview import OVERVIEW
from deploy.grafana.panels import drawn
from deploy.grafana.speculation import SPECULATION

FOLDER = Path(__file__).parent / "dashboards"


def made() -> dict[str, str]:
    """The files' texts, by name."""
    return {
        f"{dashboard.uid.removeprefix('outrider-')}.json": json.dumps(drawn(dashboard), indent=2) + "\n"
        for dashboard in (OVERVIEW, SPECULATION)
    }


if __name__ == "__main__":
    for name, text in made().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
