"""The pages that are shipped, and the blocks in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

_FENCE = re.compile(
    r"^(?:<!-- (?P<comment>.*?) -->\n)?```(?P<language>\S*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Block:
    """What stands between two fences."""

    language: str
    text: str
    excuse: str  # why it is not run; "" for those that are
    line: int

    @property
    def commands(self) -> list[str]:
        """Of a block for a shell: its commands, each on one line. In a console they follow a `$`."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def blocks(name: str) -> Iterator[Block]:
    """All blocks of a page, in their order."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        comment = match["comment"] or ""
        excuse = comment.removeprefix("not run: ") if comment.startswith("not run: ") else ""
        yield Block(match["language"], match["text"], excuse, text.count("\n", 0, match.start()) + 1)


def prose(name: str) -> str:
    """A page without its blocks."""
    return _FENCE.sub("", (ROOT / name).read_text(encoding="utf-8"))
