"""Holds names to the glossary, and sentences to plain English: `python -m tests.words`. Part of `make lint`.

Found are, by reading the product's source alone:

- `not-unique`: two public classes of the product have one name;
- `discarded`: a name or a docstring has a word that `docs/glossary.toml` replaces by another;
- `circle`: modules that import one another, for type checking alone or not.

And in comments, docstrings and pages of the whole repository: `unclear`, a wording of `UNCLEAR` that readers have to
guess at. Each finding says what to write instead.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PRODUCT = ("outrider", "drafter_svc", "verifier_svc", "router")
GLOSSARY = ROOT / "docs" / "glossary.toml"
WRITTEN = (*PRODUCT, "bench", "deploy", "docs", "examples", "models", "protos", "recipes", "tests")
ENDINGS = {".py", ".md", ".cpp", ".h"}
GENERATED = re.compile(r"_pb2|/node_modules/|^bench/results/")
SAMPLES = {"tests/words.py", "tests/test_words.py"}  # these have the wordings

Modules = Mapping[str, ast.Module]


class Pattern(NamedTuple):
    """A wording to avoid."""

    finds: re.Pattern[str]
    write: str
    kinds: frozenset[str]  # of the texts that it is looked for in


PROSE = frozenset({"comment", "docstring", "function", "page"})
CODE = PROSE - {"page"}
_RELATIVE = r"(?:[Tt]hat|which|whose|(?:at|by|for|from|in|of|on|to|up to|within) (?:which|whom))"
UNCLEAR = (
    Pattern(
        re.compile(r"\bso (?:many|much|long|few|often)\b(?! that\b| as\b)", re.IGNORECASE),
        "name the number: 'at most `limit`', 'after this time'",
        PROSE,
    ),
    Pattern(
        re.compile(
            r"(?<!\bis )(?<!\bare )(?<!\bbe )(?<!\bwas )(?<!\bwere )(?<!\bstay )(?<!\bstays )\bthe same"
            r"(?=[.,;:)]|$| (?:again|at|but|by|for|from|if|in|is|of|on|to|until|when|where|with|without)\b)",
            re.IGNORECASE,
        ),
        "add the noun: 'the same text', or repeat what is meant",
        PROSE,
    ),
    Pattern(
        re.compile(
            r"(?<!\bso )(?<!\benough )\bthat there (?:is|are|was|were)\b"
            r"|\bas (?:many|few|much)\b[^.;:]{0,30} as there (?:is|are)\b"
        ),
        "leave 'there are' out: 'all slots', 'one for each slot'",
        PROSE,
    ),
    Pattern(re.compile(rf"\A{_RELATIVE}\b"), "begin with the noun: 'tokens that ...'", CODE),
    Pattern(re.compile(r"\AWhether\b"), "begin with a verb: 'Return whether ...'", frozenset({"function"})),
)


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


def unclear(name: str, text: str) -> Iterator[str]:
    """Wordings to avoid in a file of this name: Python, C++ or Markdown."""
    for line, kind, prose in _prose(name, text):
        for pattern in UNCLEAR:
            if kind in pattern.kinds and (found := pattern.finds.search(prose)):
                words = prose[max(0, found.start() - 20) : found.end() + 30].strip()
                yield f"unclear: {name}:{line}: {words!r}; {pattern.write}"


def _prose(name: str, text: str) -> Iterator[tuple[int, str, str]]:
    """Each text in a file: its line, its kind, and its words in one line."""
    if name.endswith(".md"):
        yield from _paragraphs(text.splitlines())
    elif name.endswith((".cpp", ".h")):
        yield from _comments((number, *_parted(line, "//")) for number, line in enumerate(text.splitlines(), 1))
    else:
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        yield from _comments(
            (it.start[0], it.line[: it.start[1]], it.string) for it in tokens if it.type == tokenize.COMMENT
        )
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                words = " ".join((ast.get_docstring(node) or "").split())
                yield getattr(node, "lineno", 1), "function" if _is_function(node) else "docstring", words


def _paragraphs(lines: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    begun, words = 1, ""
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith(("|", "#", "- ", "```")):
            yield begun, "page", words
            begun, words = number, ""
        words = f"{words} {line.strip()}".strip()
    yield begun, "page", words


def _comments(lines: Iterable[tuple[int, str, str]]) -> Iterator[tuple[int, str, str]]:
    """Comments, of which those that fill the lines of a paragraph are one. `lines`: number, code, comment."""
    begun, last, words = 0, 0, ""
    for number, code, comment in lines:
        if words and (code.strip() or number != last + 1):
            yield begun, "comment", words
            words = ""
        part = comment.lstrip("#/ ").strip()
        if code.strip():
            yield number, "comment", part
        else:
            begun, words = (begun, f"{words} {part}") if words else (number, part)
        last = number
    if words:
        yield begun, "comment", words


def _parted(line: str, mark: str) -> tuple[str, str]:
    code, _, comment = line.partition(mark)
    return code, comment


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not any(
        "property" in ast.unparse(it) for it in node.decorator_list
    )


def sentences(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """The files with prose, by name, but what is generated or fetched."""
    for file in sorted([*root.glob("*.md"), *(it for top in WRITTEN for it in (root / top).rglob("*"))]):
        name = file.relative_to(root).as_posix()
        if file.suffix in ENDINGS and name not in SAMPLES and not GENERATED.search(name):
            yield name, file.read_text(encoding="utf-8")


def main(findings: Iterable[str]) -> int:
    """Prints the findings; gives the exit status."""
    found = list(findings)
    print("\n".join([*found, f"words: findings={len(found)}"]))
    return 1 if found else 0


if __name__ == "__main__":
    source = parsed()
    wordings = (finding for name, text in sentences() for finding in unclear(name, text))
    sys.exit(main([*not_unique(source), *discarded(source, replaced()), *circles(source), *wordings]))
