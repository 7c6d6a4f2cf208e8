"""Finds code by the function that it is in and by its syntax: neither its file, nor its line, nor its layout matters.

A function is named as in a traceback, `TokenTree.graft`, with as much of its module in front as makes it the only one
of that name. A class or a module may be named as well, for what is in no function.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("outrider", "router", "verifier_svc", "drafter_svc")
_CONTEXT = re.compile(r", ctx=(Load|Store|Del)\(\)")


@dataclass(frozen=True, slots=True)
class Scope:
    """A function, a class or a module."""

    file: Path
    path: tuple[str, ...]  # the names of the classes and functions that lead to it, within its module


def scope(name: str) -> Scope:
    """Return what a name is of. Raises ValueError unless it is of one thing."""
    found = [it for full, it in scopes()[name.rpartition(".")[2]] if full == name or full.endswith(f".{name}")]
    if len(found) != 1:
        there = ", ".join(str(it.file.relative_to(ROOT)) for it in found) or "nowhere"
        raise ValueError(f"{name}: is the name of {len(found)} things ({there}), must be of one")
    return found[0]


def replaced(name: str, before: str, after: str) -> str:
    """Return the code of a module in which a function has `after` in the place of `before`: an expression, or
    statements. Raises ValueError unless it has it there exactly once."""
    where = scope(name)
    tree = ast.parse(where.file.read_text(encoding="utf-8"))
    count = _replace(_inside(tree, where.path), before, after)
    if count != 1:
        raise ValueError(f"{name}: has {before!r} {count} times, must have it once")
    return ast.unparse(ast.fix_missing_locations(tree))


def _replace(node: ast.AST, before: str, after: str) -> int:
    try:
        old, new = (ast.parse(code, mode="eval").body for code in (before, after))
    except SyntaxError:
        return _replace_statements(node, ast.parse(before).body, ast.parse(after).body or [ast.Pass()])
    count, wanted = 0, form(old)
    for parent in [*ast.walk(node)]:
        for field, value in ast.iter_fields(parent):
            values = value if isinstance(value, list) else [value]
            for index, child in enumerate(values):
                if isinstance(child, ast.expr) and form(child) == wanted:
                    count += 1
                    if isinstance(value, list):
                        value[index] = new
                    else:
                        setattr(parent, field, new)
    return count


def _replace_statements(node: ast.AST, before: Sequence[ast.stmt], after: Sequence[ast.stmt]) -> int:
    count, wanted = 0, [form(statement) for statement in before]
    for parent in [*ast.walk(node)]:
        for _, body in ast.iter_fields(parent):
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                forms = [form(statement) for statement in body]
                places = [at for at in range(len(forms)) if forms[at : at + len(wanted)] == wanted]
                count += len(places)
                for at in reversed(places):
                    body[at : at + len(wanted)] = after
    return count


def form(node: ast.AST) -> str:
    """Return what two pieces of code have in common that differ in layout alone."""
    return _CONTEXT.sub("", ast.dump(node))


def _inside(tree: ast.Module, path: tuple[str, ...]) -> ast.AST:
    node: ast.AST = tree
    for name in path:
        (node,) = (it for it in named(node) if it.name == name)
    return node


def named(node: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the classes and functions right within one, also below a condition."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif isinstance(child, ast.stmt):
            yield from named(child)


@cache
def scopes() -> dict[str, list[tuple[str, Scope]]]:
    """All of the product, by the last part of their names."""
    found: dict[str, list[tuple[str, Scope]]] = defaultdict(list)

    def add(file: Path, module: str, path: tuple[str, ...], node: ast.AST) -> None:
        full = ".".join((module, *path))
        found[full.rpartition(".")[2]].append((full, Scope(file, path)))
        seen = set()
        for below in named(node):
            if below.name not in seen:  # of a property, the one that reads it
                seen.add(below.name)
                add(file, module, (*path, below.name), below)

    for package in PRODUCT:
        for file in sorted((ROOT / package).rglob("*.py")):
            if not file.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
                add(file, module, (), ast.parse(file.read_text(encoding="utf-8")))
    return found
