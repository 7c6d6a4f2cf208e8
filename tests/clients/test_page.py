"""docs/clients.md."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLOWS = ROOT / "tests" / "clients" / "flows"


def test_the_page_names_the_versions_that_are_run() -> None:
    rows = re.findall(r"^\| ([a-z-]+) ([\d.]+) \|", (ROOT / "docs" / "clients.md").read_text(), re.MULTILINE)
    pinned = {line for file in FLOWS.glob("*/packages.txt") for line in file.read_text().splitlines()}
    of_node = json.loads((FLOWS / "node" / "package.json").read_text())["dependencies"]
    assert len(rows) > 15
    for name, version in rows:
        extras = {f"{name}{extra}=={version}" for extra in ("", "[api]", "[proxy]", "[openai,anthropic]")}
        assert extras & pinned or of_node.get(name) == version, name
