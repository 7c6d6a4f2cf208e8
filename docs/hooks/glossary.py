"""The glossary: `docs/glossary.toml`, as a page."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from docs.hooks.tables import code, table

FILE = Path(__file__).parents[1] / "glossary.toml"


def reference() -> str:
    """All sections with their terms, in Markdown."""
    return "\n\n".join(_sections())


def _sections() -> Iterator[str]:
    for section in tomllib.loads(FILE.read_text(encoding="utf-8"))["section"]:
        terms = section["term"]
        places = any("where" in term for term in terms)
        rows = [
            (
                f"*{term['word']}*",
                term["meaning"],
                *([code(term["where"]) if "where" in term else ""] if places else []),
            )
            for term in terms
        ]
        yield f"## {section['title']}\n\n{table(['word', 'meaning', *(['where'] if places else [])], rows)}"
