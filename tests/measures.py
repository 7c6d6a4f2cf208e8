"""Holds the size and the shape of the code: `make lint` fails where a figure gets worse, and where one that has got
better is not written down here.

usage: python -m tests.measures
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("outrider", "router", "verifier_svc", "drafter_svc", "integrations/vllm/outrider_vllm")
FILES_A_FOLDER, LINES_A_CLASS = 16, 250
PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_exit"}  # their underscore only sets them apart

# Each figure, what it may be today, and what it is to become.
LIMITS = {
    "lines of the product": (78_955, 53_000),
    "folders with more files than 16": (0, 0),
    "classes with more lines than 250": (0, 0),
    "modules that import a message's module": (14, 14),
    "private attributes that tests use": (40, 60),
}


@cache
def modules(*folders: str) -> dict[Path, ast.Module]:
    """The modules below folders, without generated ones."""
    files = (file for folder in folders for file in sorted((ROOT / folder).rglob("*.py")))
    return {
        file.relative_to(ROOT): ast.parse(file.read_text(encoding="utf-8"))
        for file in files
        if not file.name.endswith(("_pb2.py", "_pb2_grpc.py"))
    }


def lines() -> Iterable[str]:
    """The lines of the product, those of other languages among them."""
    for folder in PRODUCT:
        for file in sorted((ROOT / folder).rglob("*")):
            if (
                file.suffix in (".py", ".lua", ".cpp", ".hpp", ".inc", ".js", ".css", ".html")
                and "_pb2" not in file.name
            ):
                yield from file.read_text(encoding="utf-8").splitlines()


def full_folders() -> Iterable[str]:
    """Folders with many files."""
    count: Counter[Path] = Counter()
    for folder in PRODUCT:
        for file in (ROOT / folder).rglob("*"):
            generated = "_pb2" in file.name or file.suffix in (".so", ".pyc")
            if file.is_file() and file.name != "__init__.py" and not generated:
                count[file.parent.relative_to(ROOT)] += 1
    return (f"{folder} has {files}" for folder, files in count.items() if files > FILES_A_FOLDER)


def long_classes() -> Iterable[str]:
    """Classes with many lines."""
    for file, module in modules(*PRODUCT).items():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef) and (size := (node.end_lineno or 0) - node.lineno + 1) > LINES_A_CLASS:
                yield f"{file}: {node.name} has {size}"


def importers_of_messages() -> Iterable[str]:
    """Modules that import a module which protoc has made."""
    for file, module in modules(*PRODUCT).items():
        names = {name for node in ast.walk(module) for name in _imported(node)}
        if any("_pb2" in name for name in names):
            yield str(file)


def private_accesses() -> Iterable[str]:
    """Attributes with an underscore that tests use of what is not their own."""
    for file, module in modules("tests").items():
        for node in ast.walk(module):
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
                continue
            if node.attr not in PUBLIC and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield f"{file}:{node.lineno}: {node.attr}"


def _imported(node: ast.AST) -> list[str]:
    """The modules, or names in modules, that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


MEASURES: dict[str, Callable[[], Iterable[str]]] = dict(
    zip(
        LIMITS,
        (lines, full_folders, long_classes, importers_of_messages, private_accesses),
        strict=True,
    )
)


def main() -> None:
    """The command."""
    worse = 0
    for name, (limit, aim) in LIMITS.items():
        found = [*MEASURES[name]()]
        print(f"measures: {name}: {len(found)} (at most {limit}, aim {aim})")
        if len(found) > limit:
            worse += 1
            if len(found) < 1000:
                print(*(f"    {one}" for one in found), sep="\n")
        elif len(found) < limit - limit // 200:
            worse += 1
            print(f"    better than what {Path(__file__).name} allows: write {len(found)} there")
    sys.exit(worse > 0)


if __name__ == "__main__":
    main()
