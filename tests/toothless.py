"""Lists tests that cannot fail: `python -m tests.toothless [PATH ...]`. Part of `make lint`.

Found are, by reading the source alone:

- `no-assertion`: nothing is asserted, neither in the test nor in what it calls from the tests' own modules;
- `no-product`: nothing of the product is used, neither directly nor through a fixture or a helper;
- `weak`: all that is asserted is that something is there, or more than nothing;
- `early-return`: the test may return before its assertions, and then counts as passed;
- `swallowed`: a failed assertion is caught;
- `repeated`: a loop tries again until an assertion would hold.

A line that is right all the same carries `# bites: REASON`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("outrider", "drafter_svc", "verifier_svc", "router", "bench", "deploy", "docs", "protos")
OTHER_PATHS = ("Makefile", "README.md", "Dockerfile", "mkdocs.yml", "recipes", "examples", "site", "manifests")
NAMED = re.compile(rf"\b({'|'.join(PRODUCT)}|tests)[./]\w|import outrider|^outrider$")  # in commands and scripts
ALLOWED = "# bites: "
RAISERS = ("raises", "warns", "fail")  # of pytest
BROAD = ("AssertionError", "Exception", "BaseException")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, order=True)
class Finding:
    """One line of a test, and what is wrong there."""

    file: Path
    line: int
    kind: str
    test: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind}: {self.test}"


class Module:
    """A file of the tests, with the names that it knows."""

    def __init__(self, path: Path) -> None:
        source = path.read_text(encoding="utf-8")
        self.path = path
        self.lines = source.splitlines()
        self.tree = ast.parse(source)
        self.imported = dict(_imported(self.tree, path))  # name here -> (module, name there)
        self.defined = {node.name: node for node in self.tree.body if isinstance(node, Function | ast.ClassDef)}
        self.constants = {
            target.id: node.value
            for node in self.tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def tests(self) -> Iterator[Function]:
        """Those of the module and of its classes."""
        for node in ast.walk(self.tree):
            if isinstance(node, Function) and node.name.startswith("test_"):
                yield node


def main(arguments: list[str]) -> int:
    """Prints what was found; 1 if there is anything."""
    paths = [Path(argument).resolve() for argument in arguments] or sorted((ROOT / "tests").rglob("test_*.py"))
    found = [finding for path in paths for finding in toothless(path)]
    for finding in found:
        print(finding)
    return 1 if found else 0


def toothless(path: Path) -> list[Finding]:
    """What is wrong with the tests of one file."""
    module = _module(path)
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    found = [Finding(shown, line, kind, test.name) for test in module.tests() for kind, line in _faults(module, test)]
    return sorted(one for one in found if ALLOWED not in module.lines[one.line - 1])


def _faults(module: Module, test: Function) -> Iterator[tuple[str, int]]:
    reached = list(_reached(module, test))
    if not any(_asserts(part) for _, part in reached):
        yield "no-assertion", test.lineno
    elif not any(_asserts(part) for home, part in reached if part is not test) and _weak(test):
        yield "weak", test.lineno
    if not any(_of_product(home, part) for home, part in reached):
        yield "no-product", test.lineno
    for node in _own(test):
        match node:
            case ast.Return():
                yield "early-return", node.lineno
            case ast.ExceptHandler() if _broad(node.type) and not _raises_again(node):
                yield "swallowed", node.lineno
            case ast.With() | ast.AsyncWith() if any(_suppresses(item.context_expr) for item in node.items):
                yield "swallowed", node.lineno
            case ast.For() if _tries_again(node) and not _asserts(node):
                yield "repeated", node.lineno


def _reached(module: Module, test: ast.AST) -> Iterator[tuple[Module, ast.AST]]:
    """The test, and every function, fixture and class of the tests that it leads to."""
    seen: set[tuple[Path, str]] = set()
    waiting: list[tuple[Module, ast.AST]] = [(module, test)]
    while waiting:
        home, part = waiting.pop()
        yield home, part
        for name in _names(part):
            for there, found in _definitions(home, name):
                label = getattr(found, "name", name)
                if (there.path, label) not in seen:
                    seen.add((there.path, label))
                    waiting.append((there, found))


def _definitions(home: Module, name: str) -> Iterator[tuple[Module, ast.AST]]:
    """What a name stands for in the tests: defined here, imported, or a fixture of a conftest above."""
    if name in home.defined:
        yield home, home.defined[name]
    elif name in home.constants:
        yield home, home.constants[name]
    elif name in home.imported:
        module, original = home.imported[name]
        path = _path_of(f"{module}.{original}") or _path_of(module)
        if path is not None:
            there = _module(path)
            if original in there.defined:
                yield there, there.defined[original]
            elif path == _path_of(f"{module}.{original}"):
                yield there, there.tree  # a whole module, of which attributes are used
            elif original in there.imported or original in there.constants:
                yield from _definitions(there, original)
    else:
        for folder in home.path.parents:
            conftest = folder / "conftest.py"
            if conftest.exists() and name in _module(conftest).defined:
                there = _module(conftest)
                yield there, there.defined[name]
                break
            if folder == ROOT:
                break


@cache
def _of_product(module: Module, part: ast.AST) -> bool:
    """Return whether a part uses what the product has, by import, or by name in a command or a script."""
    if any(module.imported.get(name, ("",))[0].partition(".")[0] in PRODUCT for name in _names(part)):
        return True
    texts = (node.value for node in ast.walk(part) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return any(NAMED.search(text) or _is_path(text) for text in texts)


def _is_path(text: str) -> bool:
    """Of a file or folder of the product."""
    first = text.partition("/")[0]
    return first in OTHER_PATHS or first in PRODUCT


@cache
def _asserts(part: ast.AST) -> bool:
    for node in ast.walk(part):
        match node:
            case ast.Assert() | ast.Raise(exc=ast.Call(func=ast.Name(id="AssertionError"))):
                return True
            case ast.Call(func=ast.Attribute(attr=name)) | ast.Call(func=ast.Name(id=name)):
                if name in RAISERS or name.startswith("assert_") or name == "run_state_machine_as_test":
                    return True
    return False


def _weak(test: Function) -> bool:
    """Return whether every assertion of a test holds of nearly anything."""
    if any(_asserts(node) for node in ast.walk(test) if isinstance(node, ast.Call)):
        return False
    return all(_holds_of_much(node.test) for node in ast.walk(test) if isinstance(node, ast.Assert))


def _holds_of_much(claim: ast.expr) -> bool:
    match claim:
        case ast.Compare(ops=[ast.Gt() | ast.NotEq()], comparators=[ast.Constant(value=0 | 0.0)]):
            return True
        case ast.Compare(ops=[ast.Lt()], left=ast.Constant(value=0 | 0.0), comparators=[_]):
            return True
        case ast.Compare(ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return True
        case ast.Call(func=ast.Name(id="isinstance" | "hasattr" | "callable")):
            return True
    return False


def _own(test: Function) -> Iterator[ast.AST]:
    """Nodes of a test without those of the functions defined in it."""
    waiting: list[ast.AST] = list(test.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(node))


def _broad(kind: ast.expr | None) -> bool:
    """Return whether an `except` of this catches failed assertions."""
    kinds: Iterable[ast.expr | None] = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(one is None or (isinstance(one, ast.Name) and one.id in BROAD) for one in kinds)


def _raises_again(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(node, ast.Raise) for node in ast.walk(handler))


def _suppresses(context: ast.expr) -> bool:
    match context:
        case ast.Call(func=ast.Name(id="suppress") | ast.Attribute(attr="suppress"), args=kinds):
            return any(_broad(kind) for kind in kinds)
    return False


def _tries_again(loop: ast.For) -> bool:
    """A loop that counts attempts, and leaves by `break` at the first that is good."""
    counts = isinstance(loop.target, ast.Name) and loop.target.id.startswith("_")
    leaves = any(
        isinstance(node, ast.If) and any(isinstance(child, ast.Break) for child in node.body) for node in loop.body
    )
    return counts and leaves


@cache
def _names(part: ast.AST) -> frozenset[str]:
    names = {node.id for node in ast.walk(part) if isinstance(node, ast.Name)}
    names |= {node.arg for node in ast.walk(part) if isinstance(node, ast.arg)}
    return frozenset(names) | {
        mark.value
        for node in ast.walk(part)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "usefixtures"
        for mark in node.args
        if isinstance(mark, ast.Constant) and isinstance(mark.value, str)
    }


def _imported(tree: ast.Module, path: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                for alias in node.names:
                    yield alias.asname or alias.name.partition(".")[0], (alias.name, "")
            case ast.ImportFrom(module=str(module), level=0):
                for alias in node.names:
                    yield alias.asname or alias.name, (module, alias.name)


def _path_of(module: str) -> Path | None:
    if module.partition(".")[0] != "tests":
        return None
    path = ROOT.joinpath(*module.strip(".").split("."))
    file = path.with_suffix(".py")
    return file if file.exists() else None


@cache
def _module(path: Path) -> Module:
    return Module(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
