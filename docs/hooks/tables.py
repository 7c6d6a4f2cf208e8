"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that hold Markdown. Bars may stand in code alone."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(text: object) -> str:
    """As it is typed. A bar would end a table's cell at some code hosts, even within backquotes."""
    typed = str(text)
    return f"<code>{escape(typed, quote=False).replace('|', '&#124;')}</code>" if "|" in typed else f"`{typed}`"
