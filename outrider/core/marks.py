"""Marks in a text that comes in pieces."""

from __future__ import annotations


def begun_mark(text: str, mark: str) -> int:
    """Return the length of the text's longest end that is the beginning of a mark, but not all of it."""
    start = text.find(mark[0], max(0, len(text) - len(mark) + 1)) if mark else -1
    while start >= 0 and not mark.startswith(text[start:]):
        start = text.find(mark[0], start + 1)
    return len(text) - start if start >= 0 else 0
