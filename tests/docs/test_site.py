"""The site builds without a warning, from what is here alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import NAMES, ROOT

TYPED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=\"?(?:https?:)?//[^>]+>")


def build(checkout: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_built_and_in_the_navigation(site: Path) -> None:
    start = (site / "index.html").read_text(encoding="utf-8")
    for name in NAMES:
        folder, page = Path(name).parent, Path(name).stem
        if folder == Path():
            continue  # the README
        address = (Path(*folder.parts[1:]) / page).as_posix()
        assert (site / ("" if page == "index" else address) / "index.html").is_file()
        assert f'href="{"." if page == "index" else address + "/"}"' in start, name


def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not TYPED.findall(page.read_text(encoding="utf-8")), page


def test_the_references_are_where_their_marks_stand(site: Path) -> None:
    assert "tenant_tokens_per_min" in (site / "configuration" / "index.html").read_text(encoding="utf-8")
    assert "--speculation" in (site / "commands" / "index.html").read_text(encoding="utf-8")


def test_links_that_lead_nowhere_fail_the_build(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    with (tmp_path / "docs" / "glossary.md").open("a", encoding="utf-8") as page:
        page.write("\n[a page](nowhere.md) and [a heading](redis.md#not-there)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr
    assert "#not-there" in done.stderr
