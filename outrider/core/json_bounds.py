"""Bounds on callers' JSON, which is checked while it is text.

A parser makes up to a hundred bytes of one, and a parser that recurses has a stack that ends. So strings, lists,
objects and their depth are counted first, at about the speed of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from outrider.errors import InvalidRequest


class JsonCounts(NamedTuple):
    """What some JSON has, or may have."""

    depth: int = 0  # lists and objects within one another
    containers: int = 0  # lists and objects
    strings: int = 0  # keys included
    values: int = 0  # numbers and the like, lists and objects


MOST = JsonCounts(depth=64, containers=2**14, strings=2**16, values=2**19)  # of one request
_NAMES = JsonCounts("levels of lists and objects", "lists and objects", "strings", "values")  # type: ignore[arg-type]
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = dict.fromkeys(b"[{", 1) | dict.fromkeys(b"]}", -1)


class JsonBounds:
    """Bounds on all JSON of one request together."""

    def __init__(self) -> None:
        self.counted = JsonCounts()

    def check(self, field: str, text: str | bytes) -> None:
        """Count a field's JSON. Raises InvalidRequest, which names the field, where the request has more than `MOST`.

        The field "" is a whole body: the error names the member of its outermost object. If the text is no JSON, what
        a parser reads of it is counted.
        """
        raw = text.encode(errors="replace") if isinstance(text, str) else text
        if b"\\" in raw:  # pairs of backslashes first; what is left before a quote makes it a part of its string
            raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = raw.split(b'"', 2 * MOST.strings + 2)  # outside of strings and inside, in turn
        outside = b'"'.join(parts[::2])
        brackets = outside.translate(None, _OTHERS)
        before, containers = self.counted, _containers(brackets)
        steps = accumulate(map(_STEPS.__getitem__, brackets[: 2 * MOST.containers]))
        self.counted = JsonCounts(
            max(steps, default=0),
            before.containers + containers,
            before.strings + len(parts) // 2,
            before.values + outside.count(b",") + containers,
        )
        for kind, most in enumerate(MOST):
            if self.counted[kind] > most:
                raise InvalidRequest(field or _excessive_member(parts, kind), f"has more than {most} {_NAMES[kind]}")


def check_json(field: str, text: str | bytes) -> None:
    """Check JSON that is alone in its request. Raises InvalidRequest as `JsonBounds.check`."""
    JsonBounds().check(field, text)


def _containers(brackets: bytes) -> int:
    return brackets.count(b"[") + brackets.count(b"{")


def _excessive_member(parts: Sequence[bytes], kind: int) -> str:
    """Return the key of the outermost object behind which a count of `JsonCounts` is more than `MOST`."""
    member, most = b"body", MOST[kind]
    depth = deepest = containers = commas = 0
    for index in range(0, len(parts), 2):
        outside = parts[index]
        if depth == 1 and index and outside.lstrip().startswith(b":"):
            member = parts[index - 1]
        if brackets := outside.translate(None, _OTHERS):
            for bracket in brackets[: 2 * MOST.containers]:
                depth += _STEPS[bracket]
                deepest = max(deepest, depth)
            containers += _containers(brackets)
        commas += outside.count(b",")
        if (deepest, containers, index // 2 + 1, commas + containers)[kind] > most:
            break
    return member.decode(errors="replace")
