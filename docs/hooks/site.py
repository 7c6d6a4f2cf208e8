"""What mkdocs calls while it builds: see mkdocs.yml."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([^)#]+)[^)]*\)")  # a link to what is no page of the site


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """In the navigation a folder becomes its pages."""
    pages = sorted(file.src_uri for file in files.documentation_pages())
    entries: list[Any] = config.nav or []
    config.nav = [_unfolded(entry, pages) for entry in entries]
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """What lies outside the site is named instead of linked."""
    return _OUTSIDE.sub(lambda link: _outside(link[1], link[2]), markdown)


def _unfolded(entry: Any, pages: list[str]) -> Any:
    if isinstance(entry, dict):
        return {title: _unfolded(inner, pages) for title, inner in entry.items()}
    if isinstance(entry, list):
        return [_unfolded(inner, pages) for inner in entry]
    return [page for page in pages if page.startswith(entry)] if entry.endswith("/") else entry


def _outside(text: str, path: str) -> str:
    return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"
