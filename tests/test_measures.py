"""What `make lint` measures of the code is what is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import measures

LONG_CLASS = "class Long:\n" + "    x = 1\n" * 250


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A product and its tests, with one of each that is measured."""
    files = {
        "outrider/few/one.py": LONG_CLASS,
        **{f"outrider/many/{number}.py": "" for number in range(17)},
        "router/text/words.py": "from router.api import servicer\nfrom router.text.other import x\n",
        "router/api/servicer.py": "from outrider.v1 import types_pb2\nimport router.text.words\n",
        "tests/test_one.py": "def test(it):\n    assert it._hidden and it._asdict() and it.__class__\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(measures, "ROOT", tmp_path)
    measures.modules.cache_clear()
    yield tmp_path
    measures.modules.cache_clear()


def test_each_figure_counts_its_findings(code: Path) -> None:
    found = {name: [*measure()] for name, measure in measures.MEASURES.items()}
    assert len(found.pop("lines of the product")) == 251 + 4
    assert found == {
        "folders with more files than 16": ["outrider/many has 17"],
        "classes with more lines than 250": ["outrider/few/one.py: Long has 251"],
        "modules that import a message's module": ["router/api/servicer.py"],
        "private attributes that tests use": ["tests/test_one.py:2: _hidden"],
    }


@pytest.mark.parametrize(("limit", "fails"), [(1, False), (0, True), (200, True)])
def test_a_worse_figure_fails_and_so_does_an_unrecorded_better_one(
    code: Path, monkeypatch: pytest.MonkeyPatch, limit: int, fails: bool
) -> None:
    name = "private attributes that tests use"
    monkeypatch.setattr(measures, "LIMITS", {name: (limit, 0)})
    with pytest.raises(SystemExit) as ended:
        measures.main()
    assert bool(ended.value.code) is fails
