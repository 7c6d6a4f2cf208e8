"""docs/protocol.md, as far as tests read it: its headings and its tables."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text(encoding="utf-8")


def headings() -> dict[int, str]:
    """The numbered headings."""
    return {int(number): title for number, title in re.findall(r"^## (\d+)\. (.+)$", PAGE, re.MULTILINE)}


def table(number: int) -> list[list[str]]:
    """The cells of the table under a numbered heading, without the table's own heading and without backquotes."""
    section = re.split(r"^## \d+\. .+$", PAGE, flags=re.MULTILINE)[number]
    rows = re.findall(r"^\|(.+)\|$", section, re.MULTILINE)
    return [[cell.strip().replace("`", "") for cell in row.split("|")] for row in rows[2:]]
