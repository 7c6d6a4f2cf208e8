"""The page and the tests keep together."""

from pathlib import Path

from tests.e2e.protocol.page import headings


def test_every_numbered_heading_has_exactly_one_test_file() -> None:
    files = sorted(Path(__file__).parent.glob("test_[0-9]*.py"))
    assert [int(file.name[5:7]) for file in files] == list(headings())
    for file, (number, title) in zip(files, headings().items(), strict=True):
        assert file.read_text(encoding="utf-8").startswith(f'"""{number}. {title}."""\n')
