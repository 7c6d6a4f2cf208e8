"""The list of hand-made mutants fits the product as it is; `make mutants` runs it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import pytest
import redis

from tests.extended import EXTENDED
from tests.mutants import listing, syntax
from tests.mutants.listing import ROOT, Mutant, listed

MUTANTS = listed()
LEAST = 60
CONTRACT = "from tests.engine.contract import *"  # in files that take tests from there

CODE = """
class Tree:
    @property
    def size(self):
        return len(self.nodes)

    def graft(self, node):
        if node in self.nodes or node.root != self.root:
            self.refused += 1
            return
        self.nodes[node] = [it for it in node.children if it]
"""


def test_each_mutant_changes_one_place_and_its_tests_exist() -> None:  # bites: of the mutants
    assert [wrong for mutant in MUTANTS if (wrong := problem(mutant))] == []


def problem(mutant: Mutant) -> str:
    """What is wrong with a mutant; empty: nothing."""
    try:
        changed = mutant.mutated()
        if mutant.path.endswith(".py"):
            compile(changed, mutant.path, "exec")
    except (ValueError, SyntaxError) as error:
        return f"{mutant.name}: {error}"
    if not mutant.promise.endswith(".") or mutant.before == mutant.after or not mutant.tests:
        return f"{mutant.name}: must have a promise, a change and tests"
    if mutant.tests[0].startswith(EXTENDED):
        return f"{mutant.name}: `make test` is to find it out"
    for test in mutant.tests:
        file, _, name = test.partition("::")
        tests = (ROOT / file).read_text(encoding="utf-8")
        if CONTRACT in tests:
            tests += (ROOT / "tests/engine/contract.py").read_text(encoding="utf-8")
        if name and not re.search(rf"^(async )?def {re.escape(name)}\(", tests, re.MULTILINE):
            return f"{mutant.name}: there is no test {test}"
    return ""


def test_the_mutants_are_numerous_and_have_distinct_names() -> None:  # bites: of the mutants
    assert len(MUTANTS) >= LEAST
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []


@pytest.fixture
def product(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A product of two modules."""
    folder = tmp_path_factory.mktemp("product")
    for name in ("one", "two"):
        (folder / "outrider" / name).mkdir(parents=True)
        (folder / "outrider" / name / "trees.py").write_text(CODE if name == "one" else "class Tree:\n    pass\n")
    monkeypatch.setattr(syntax, "ROOT", folder)
    syntax.scopes.cache_clear()
    yield
    syntax.scopes.cache_clear()


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize(
    ("before", "after", "there"),
    [
        ("node.root  !=  self.root", "False", "if node in self.nodes or False:"),
        ("[it for it in node.children if it]", "[]", "self.nodes[node] = []"),
        ("self.refused += 1\nreturn", "pass", "self.root:\n            pass"),
    ],
)
def test_code_is_found_by_its_syntax_in_the_function_that_is_named(  # bites: of the mutants
    before: str, after: str, there: str
) -> None:
    changed = syntax.replaced("Tree.graft", before, after)
    assert there in changed
    assert before not in changed
    assert "return len(self.nodes)" in changed


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize("before", ["self.nodes", "len(self.nodes)", "it for it in node.children if it"])
def test_code_that_matches_twice_or_not_at_all_is_refused(before: str) -> None:  # bites: of the mutants
    with pytest.raises((ValueError, SyntaxError)):
        syntax.replaced("Tree.graft", before, "None")


@pytest.mark.usefixtures("product")
def test_a_function_name_is_unambiguous() -> None:  # bites: of the mutants
    assert syntax.scope("one.trees.Tree") == syntax.scope("outrider.one.trees.Tree")
    for name in ("Tree", "trees.Tree", "raft", "Tree.prune"):
        with pytest.raises(ValueError, match="must be of one"):
            syntax.scope(name)


def test_mutants_follow_a_function_that_gets_another_name(  # bites: of the mutants
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path_factory.mktemp("lists") / "area.toml"
    names = ["Tree.graft", "trees.Tree.graft", "Tree.graft_all", "Tree", "Old.Tree.graft.inner"]
    file.write_text("".join(f'function = "{name}"\n' for name in names))
    monkeypatch.setattr(listing, "LISTS", [file])
    assert listing.rename("Tree.graft", "Tree.add") == 3
    assert re.findall('"(.*)"', file.read_text()) == [
        "Tree.add",
        "trees.Tree.add",
        "Tree.graft_all",
        "Tree",
        "Old.Tree.add.inner",
    ]


def test_mutated_scripts_are_lua(redis_url: str) -> None:  # bites: a script that is none is refused
    """A script that does not compile would be found out by every test, and show nothing."""
    folder = ROOT / "outrider" / "store" / "scripts"
    prelude = (folder / "prelude.lua").read_text(encoding="utf-8")
    with redis.Redis.from_url(redis_url) as client:
        for mutant in MUTANTS:
            if mutant.path.endswith(".lua"):
                changed = mutant.mutated()
                client.script_load(changed if mutant.path.endswith("prelude.lua") else prelude + changed)
