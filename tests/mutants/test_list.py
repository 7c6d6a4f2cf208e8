"""The list of hand-made mutants fits the product as it is; `make mutants` runs it."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import redis

from tests.mutants.listing import ROOT, Mutant, listed

MUTANTS = listed()
LEAST = 60


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place_and_its_tests_are_there(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    changed = mutant.applied(text)
    assert changed != text
    assert not mutant.file.startswith("tests/")
    if mutant.file.endswith(".py"):
        compile(changed, mutant.file, "exec")
    assert mutant.promise.endswith(".")
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        tests = (ROOT / file).read_text(encoding="utf-8")
        assert not name or re.search(rf"^(async )?def {re.escape(name)}\(", tests, re.MULTILINE)


def test_there_are_many_and_each_has_a_name_of_its_own() -> None:
    assert len(MUTANTS) >= LEAST
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []


def test_mutated_scripts_are_lua(redis_url: str) -> None:
    """A script that does not compile would be found out by every test, and show nothing."""
    folder = ROOT / "outrider" / "store"
    prelude = (folder / "prelude.lua").read_text(encoding="utf-8")
    with redis.Redis.from_url(redis_url) as client:
        for mutant in MUTANTS:
            if mutant.file.endswith(".lua"):
                changed = mutant.applied((ROOT / mutant.file).read_text(encoding="utf-8"))
                client.script_load(changed if mutant.file.endswith("prelude.lua") else prelude + changed)
