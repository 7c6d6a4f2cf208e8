"""The reference of the SDK: its classes, as their docstrings, signatures and comments have them."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from typing import Any

import outrider
from docs.hooks.tables import code, table
from outrider import errors
from outrider.cli.comments import field_comments

CLIENT = "AsyncClient"  # `Client` has the same methods
STREAM = "AsyncStream"
LEFT_OUT = {"schema", "terms", "form"}  # fields that the SDK keeps for itself


def reference() -> str:
    """All of it, in Markdown."""
    names = [CLIENT, STREAM, *(name for name in outrider.__all__ if name not in (CLIENT, STREAM, "errors"))]
    sections = [_section(name, getattr(outrider, name)) for name in names if name not in ("Client", "Stream")]
    tree = _prose(errors).partition("\n\n")[2]
    return "\n\n".join([*sections, f"## Errors\n\nAll are in `outrider.errors`.\n\n```text\n{tree}\n```"])


def _section(name: str, described: Any) -> str:
    parts = [f"## {name}", _prose(described)]
    if issubclass(described, enum.Enum):
        parts.append(_enumeration(described))
    elif rows := _fields(described):
        parts.append(table(("name", "type", "what it is"), rows))
    if not dataclasses.is_dataclass(described):
        parts += _methods(described)
    return "\n\n".join(filter(None, parts))


def _prose(described: Any) -> str:
    """Its docstring."""
    return inspect.cleandoc(described.__doc__ or "")


def _enumeration(described: type[enum.Enum]) -> str:
    comments = field_comments(described)
    rows = [(code(member.value), comments[member.name]) for member in described]
    return table(("value", "what it means"), rows)


def _fields(described: type) -> list[tuple[str, str, str]]:
    declared = getattr(described, "__annotations__", {})
    if not (dataclasses.is_dataclass(described) or hasattr(described, "__total__")):
        return []
    comments = field_comments(described)
    rows = [
        (code(key), code(_typed(kind)), comments[key])
        for key, kind in declared.items()
        if not (key in LEFT_OUT and dataclasses.is_dataclass(described))
    ]
    return rows + [
        (code(key), code(_typed(inspect.signature(value.fget).return_annotation)), _first(value))
        for key, value in vars(described).items()
        if isinstance(value, property) and not key.startswith("_") and value.fget
    ]


def _methods(described: type) -> list[str]:
    return [
        f"### {described.__name__}.{key}\n\n```text\n{_signature(key, value)}\n```\n\n{_prose(value)}"
        for key, value in vars(described).items()
        if not key.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)) and value.__doc__
    ]


def _signature(name: str, value: Any) -> str:
    if isinstance(value, property):
        return f"{name} -> {_typed(inspect.signature(value.fget).return_annotation)}"  # type: ignore[arg-type]
    signature = inspect.signature(value)
    callers = [it for it in signature.parameters.values() if it.name != "self"]
    shown = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(signature.replace(parameters=callers)))  # annotations have quotes
    return f"{'async ' if inspect.iscoroutinefunction(value) else ''}{name}{shown}"


def _typed(annotation: Any) -> str:
    """As it is written; the values of a TypedDict are references to that."""
    return str(getattr(annotation, "__forward_arg__", annotation))


def _first(value: property) -> str:
    return _prose(value).partition("\n\n")[0].replace("\n", " ")
