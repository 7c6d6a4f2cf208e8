"""The check of names and docstrings (`tests/words.py`) finds what it is for, and the glossary is whole."""

from __future__ import annotations

import ast

import pytest

from docs.hooks import glossary
from tests.words import ROOT, circles, discarded, not_unique, parsed, replaced


def modules(**sources: str) -> dict[str, ast.Module]:
    return {name: ast.parse(source) for name, source in sources.items()}


def test_two_public_classes_of_one_name_are_found_and_private_ones_are_not() -> None:  # bites: of the check itself
    found = list(not_unique(modules(a="class Slot: ...\nclass _Row: ...", b="class Slot: ...\nclass _Row: ...")))
    assert found == ["not-unique: Slot is a class of a and of b; say whose it is"]


@pytest.mark.parametrize(
    "source",
    [
        "class Ledger: ...",
        "class TheLedger: ...",
        "def keep_ledger(): ...",
        "def f(ledger): ...",
        "ledger = 1",
        "for ledger in (): ...",
        '"""Of a ledger."""',
        'async def f():\n    """A ledger."""',
    ],
)
def test_a_discarded_word_is_found_in_names_and_docstrings(source: str) -> None:  # bites: of the check itself
    found = list(discarded(modules(a=source), {"ledger": "token log"}))
    assert len(found) == 1
    assert "'ledger'" in found[0]
    assert found[0].endswith("the word is 'token log'")


def test_a_discarded_word_is_found_as_a_module_and_not_as_part_of_another() -> None:  # bites: of the check itself
    assert list(discarded(modules(ledger=""), {"ledger": "token log"}))
    assert not list(discarded(modules(a="ledgers = x.ledger"), {"ledger": "token log"}))


def test_modules_that_import_one_another_are_found_under_type_checking_too() -> None:  # bites: of the check itself
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import X"
    assert "a imports b" in "".join(circles(modules(a="import b", b=guarded)))
    assert not list(circles(modules(a="import b", b="from a.c import X", **{"a.c": ""})))


def test_the_product_is_read_whole() -> None:
    assert {"outrider.core.tree.token_tree", "router.sessions.token_log", "verifier_svc", "drafter_svc"} <= set(
        parsed()
    )


def test_the_glossary_has_each_word_once_with_a_place_that_is_there() -> None:
    page = glossary.reference()
    words = [line.split("*")[1] for line in page.splitlines() if line.startswith("| *")]
    assert len(words) == len(set(words)) > 40
    places = [line.split("`")[-2] for line in page.splitlines() if line.startswith("| *") and line.endswith("` |")]
    assert places
    assert all((ROOT / place).exists() for place in places)
    assert replaced().keys().isdisjoint(words)
