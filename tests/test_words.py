"""The check of names and sentences (`tests/words.py`) finds what it is for, and the glossary is whole."""

from __future__ import annotations

import ast

import pytest

from docs.hooks import glossary
from tests.words import ROOT, circles, discarded, not_unique, parsed, replaced, sentences, unclear


def modules(**sources: str) -> dict[str, ast.Module]:
    return {name: ast.parse(source) for name, source in sources.items()}


def test_public_classes_that_share_a_name_are_found_and_private_ones_are_not() -> None:  # bites: of the check itself
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


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", "x = 1  # closed after so long"),
        ("a.py", 'def f():\n    """Yield so many sessions."""'),
        ("a.py", "x = 1  # the same in seconds"),
        ("a.py", '"""All tenants cost the same."""'),
        ("a.py", "x = 1  # rows, as many as there are"),
        ("a.py", "x = 1  # tokens of paths that there are"),
        ("a.py", "x = 1  # that a trial has"),
        ("a.py", "# up to which a kernel\n# reads weights\nx = 1"),
        ("a.py", 'def f():\n    """Whether a wait is better."""'),
        ("a.cpp", "int x = 1;  // up to so many rows"),
        ("a.md", "A page whose sentence\nends with the same."),
    ],
)
def test_a_wording_that_readers_guess_at_is_found(name: str, text: str) -> None:  # bites: of the check itself
    (found,) = unclear(name, text)
    assert found.startswith(f"unclear: {name}:")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", "x = 1  # so many that one waits, and so long as one does"),
        ("a.py", "x = 1  # the same text, and what is the same"),
        ("a.py", "x = 1  # set so that there are two"),
        ("a.py", "# a number\n# that spans lines\nx = 1"),
        ("a.py", 'class A:\n    @property\n    def f(self):\n        """Whether it waits."""'),
        ("a.py", 'x = "so many"'),
        ("a.md", "Of two passes in the same\n`dtype`."),
    ],
)
def test_plain_sentences_and_strings_are_not(name: str, text: str) -> None:  # bites: of the check itself
    assert not list(unclear(name, text))


def test_the_sentences_of_the_whole_repository_are_read() -> None:  # bites: of the check itself
    names = {name for name, _ in sentences()}
    assert {"README.md", "docs/control.md", "bench/options.py", "outrider/engine/cpu/src/model.cpp"} <= names


def test_the_product_is_read_whole() -> None:
    assert {"outrider.core.tree.token_tree", "router.sessions.token_log", "verifier_svc", "drafter_svc"} <= set(
        parsed()
    )


def test_the_glossary_has_each_word_once_with_an_existing_file() -> None:
    page = glossary.reference()
    words = [line.split("*")[1] for line in page.splitlines() if line.startswith("| *")]
    assert len(words) == len(set(words)) > 40
    places = [line.split("`")[-2] for line in page.splitlines() if line.startswith("| *") and line.endswith("` |")]
    assert places
    assert all((ROOT / place).exists() for place in places)
    assert replaced().keys().isdisjoint(words)
