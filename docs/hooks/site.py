"""What mkdocs calls while it builds: see mkdocs.yml."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from docs.hooks import commands, configuration, glossary

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

GENERATED: dict[str, Callable[[], str]] = {
    "configuration": configuration.reference,
    "commands": commands.reference,
    "glossary": glossary.reference,
}
_MARK = re.compile(r"^<!-- generated: (\w+) .*-->$", re.MULTILINE)
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([^)#]+)[^)]*\)")  # a link to what is no page of the site


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Completes the navigation: a folder becomes its pages, and a page that no entry names comes last."""
    pages = sorted(file.src_uri for file in files.documentation_pages())
    entries: list[Any] = config.nav or []
    config.nav = [_unfolded(entry, pages) for entry in entries]
    named = set(_named(config.nav))
    config.nav += [page for page in pages if page not in named]
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Puts the references where a page has their marks; what lies outside the site is named instead of linked."""
    markdown = _MARK.sub(lambda mark: GENERATED[mark[1]](), markdown)
    return _OUTSIDE.sub(lambda link: _outside(link[1], link[2]), markdown)


def _unfolded(entry: Any, pages: list[str]) -> Any:
    if isinstance(entry, dict):
        return {title: _unfolded(inner, pages) for title, inner in entry.items()}
    if isinstance(entry, list):
        return [_unfolded(inner, pages) for inner in entry]
    return [page for page in pages if page.startswith(entry)] if entry.endswith("/") else entry


def _named(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    for inner in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from _named(inner)


def _outside(text: str, path: str) -> str:
    return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"
