"""Holds names and docstrings to the glossary: `python -m tests.words`. Part of `make lint`.

Found are, by reading the product's source alone:

- `not-unique`: two public classes of the product have one name;
- `discarded`: a name or a docstring has a word that `docs/glossary.toml` replaces by another;
- `circle`: modules that import one another, for type checking alone or not.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("outrider", "drafter_svc", "verifier_svc", "router")
GLOSSARY = ROOT / "docs" / "glossary.toml"

Modules = Mapping[str, ast.Module]


def parsed(root: Path = ROOT) -> dict[str, ast.Module]:
    """The product's modules by their names, but what is generated."""
    files = (file for package in PRODUCT for file in (root / package).rglob("*.py") if "_pb2" not in file.name)
    return {
        ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            file.read_text(encoding="utf-8")
        )
        for file in files
    }


def replaced(glossary: Path = GLOSSARY) -> dict[str, str]:
    """The discarded words, each with the word to use."""
    sections = tomllib.loads(glossary.read_text(encoding="utf-8"))["section"]
    terms = [term for section in sections for term in section["term"]]
    return {word: term["word"] for term in terms for word in term.get("instead_of", ())}


def not_unique(modules: Modules) -> Iterator[str]:
    """Public classes that share a name."""
    places = defaultdict(list)
    for module, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    for name, found in sorted(places.items()):
        if len(found) > 1:
            yield f"not-unique: {name} is a class of {' and of '.join(sorted(found))}; say whose it is"


def discarded(modules: Modules, words: Mapping[str, str]) -> Iterator[str]:
    """Names and docstrings with words that are not used any more."""
    for module, tree in sorted(modules.items()):
        for line, text in _named(module, tree):
            for word in sorted(
                set(re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).lower())) & set(words)
            ):
                yield f"discarded: {module}:{line}: '{word}' in {text.strip()[:60]!r}; the word is '{words[word]}'"


def _named(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    yield 1, module.rpartition(".")[2]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""


def circles(modules: Modules) -> Iterator[str]:
    """One circle of imports, if there is any."""
    try:
        TopologicalSorter({name: set(_imports(tree, modules)) - {name} for name, tree in modules.items()}).prepare()
    except CycleError as error:
        yield f"circle: {' imports '.join(reversed(error.args[1]))}"


def _imports(tree: ast.Module, modules: Modules) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def main(findings: Iterable[str]) -> int:
    """Prints the findings; gives the exit status."""
    found = list(findings)
    print("\n".join([*found, f"words: findings={len(found)}"]))
    return 1 if found else 0


if __name__ == "__main__":
    source = parsed()
    sys.exit(main([*not_unique(source), *discarded(source, replaced()), *circles(source)]))
